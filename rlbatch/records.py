"""The nouns: `Turn -> Trajectory -> Sample`, with `Provenance` and the one list of per-token fields.

Construction checks structure only (types, dtypes, equal lengths, ids >= 0) and raises `RecordError`.
Whether values make sense is for `rlbatch.soundness` to say, so that faults can be represented and named.
Knows nothing of engines, files or tensors; numpy only.
"""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError

LogprobsMode: TypeAlias = Literal["processed", "raw", "unknown"]
Purpose: TypeAlias = Literal["train", "audit"]
FinishReason: TypeAlias = Literal["stop", "length", "abort", "tool_calls"]
Align: TypeAlias = Literal["input", "target"]

LOGPROBS_MODES: tuple[LogprobsMode, ...] = ("processed", "raw", "unknown")
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "tool_calls")
UNKNOWN_VERSION = -1
"""`policy_version` where nobody sampled the token, or nobody knows with which weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenField:
    """One per-token field of a `Sample`: entry t is about token t."""

    name: str
    dtype: np.dtype[Any]
    not_sampled: float | None
    """Value at tokens that the engine did not sample; None where every token has one."""
    padding: float
    """Value in padding, and where collation leaves no target."""
    align: Align
    """`target`: collation moves it to the position that predicts the token; `input`: it stays."""
    optional: bool = False


def _field(
    name: str, dtype: str, not_sampled: float | None, align: Align, optional: bool = False
) -> TokenField:
    padding = 0 if not_sampled is None else not_sampled
    return TokenField(
        name=name,
        dtype=np.dtype(dtype),
        not_sampled=not_sampled,
        padding=padding,
        align=align,
        optional=optional,
    )


NAN = float("nan")
TOKEN_FIELDS: tuple[TokenField, ...] = (
    _field("token_ids", "int32", None, "input"),
    _field("inference_logprobs", "float32", NAN, "target"),
    _field("loss_mask", "bool", 0, "target"),
    _field("advantages", "float32", 0, "target"),
    _field("policy_version", "int32", UNKNOWN_VERSION, "target"),
    _field("temperature", "float32", 1, "target"),
    _field("turn", "int16", -1, "target"),
    _field("raw_inference_logprobs", "float32", NAN, "target", optional=True),
    _field("teacher_logprobs", "float32", NAN, "target", optional=True),
    _field("ref_logprobs", "float32", NAN, "target", optional=True),
    _field("proximal_logprobs", "float32", NAN, "target", optional=True),
)
"""The one list of per-token fields; checks, storage, packing, collation and dialects loop over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Everything that was in force when tokens were drawn; a neutral value means it was off."""

    temperature: float
    """0 is greedy. Required: no engine default is the same everywhere."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off (vLLM's -1)."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: bool = False
    allowed_token_ids: bool = False
    bad_words: bool = False
    min_tokens: int = 0
    structured_output: bool = False

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check_scalar(f"SamplingParams.{spec.name}", getattr(self, spec.name), spec.type)
        if not (0 <= self.temperature < float("inf")):
            raise RecordError(
                f"SamplingParams.temperature: expected finite and >= 0, found {self.temperature}"
            )
        if self.top_k < 0:
            raise RecordError(f"SamplingParams.top_k: expected >= 0 (0 is off), found {self.top_k}")
        if not (0 < self.top_p <= 1):
            raise RecordError(f"SamplingParams.top_p: expected 0 < top_p <= 1, found {self.top_p}")

    @property
    def greedy(self) -> bool:
        """Tokens were the most probable ones, not draws."""
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Drawn from a kept set, renormalised (greedy decoding keeps no set)."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def reshaped(self) -> bool:
        """Something besides temperature and truncation changed the distribution."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.min_tokens > 0
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.structured_output
        )

    @property
    def neutral(self) -> bool:
        """Drawn from the model's own softmax at temperature 1."""
        return self.temperature == 1 and not self.truncated and not self.reshaped


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How a turn's logprobs came to be. A reply does not say it, so the caller must."""

    engine: str
    logprobs_mode: LogprobsMode
    """`processed`: after temperature, truncation and penalties; `raw`: of the model's own softmax."""
    sampling: SamplingParams
    engine_version: str | None = None
    model: str | None = None
    tokenizer_fingerprint: str | None = None
    """sha256 of the tokenizer's `tokenizer.json`."""
    dtype: str | None = None
    vocab_size: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise RecordError(
                f"Provenance.logprobs_mode: expected one of {', '.join(LOGPROBS_MODES)}, "
                f"found {self.logprobs_mode!r}"
            )
        if not isinstance(self.sampling, SamplingParams):
            raise RecordError(f"Provenance.sampling: expected SamplingParams, found {_kind(self.sampling)}")
        if not isinstance(self.engine, str) or not self.engine:
            raise RecordError(f"Provenance.engine: expected the engine's name, found {self.engine!r}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise RecordError(f"Provenance.vocab_size: expected >= 1, found {self.vocab_size}")
        object.__setattr__(self, "eos_token_ids", tuple(int(token_id) for token_id in self.eos_token_ids))

    @property
    def gives_behaviour_logprobs(self) -> bool:
        """The engine's values are those of the distribution that was sampled from.

        True for processed values, and for others where that distribution was the plain softmax.
        """
        return self.logprobs_mode == "processed" or self.sampling.neutral

    @property
    def trainable(self) -> bool:
        """Behaviour logprobs that a trainer can reproduce from its logits and a temperature alone."""
        if self.sampling.greedy or self.sampling.truncated or self.sampling.reshaped:
            return False
        return self.gives_behaviour_logprobs

    @property
    def auditable(self) -> bool:
        """Values that can be compared with a trainer's.

        Raw ones at temperature 1 whatever was in force, except a grammar: its mask reaches vLLM's raw values.
        """
        if self.logprobs_mode == "raw":
            return not self.sampling.structured_output
        if self.sampling.greedy:
            return self.logprobs_mode == "processed" and not self.sampling.reshaped
        return self.trainable

    def comparable(self, purpose: Purpose) -> bool:
        """Whether the turn's logprobs are judged against a trainer's for this purpose."""
        return self.trainable if purpose == "train" else self.auditable


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Half-open span of a turn's completion tokens that one version of the weights drew."""

    label: str
    """The engine's own name for the version."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts that the engine reported: evidence for checks, never a source of lengths."""

    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One engine call: the exact prompt ids, the exact sampled ids, and a logprob for each of those."""

    prompt_token_ids: NDArray[np.int32]
    """[P], P >= 1: the first sampled token needs an input to be predicted from."""
    completion_token_ids: NDArray[np.int32]
    """[C], C >= 0."""
    inference_logprobs: NDArray[np.float32]
    """[C] nats, under the distribution that was sampled from; NaN where the engine did not give that."""
    raw_inference_logprobs: NDArray[np.float32] | None = None
    """[C] nats, of the model's own softmax at temperature 1, where the engine gave those instead."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token's id or the stop string, as the engine said."""
    policy_versions: tuple[VersionSpan, ...] = ()
    """Empty where the engine said nothing."""
    provenance: Provenance
    usage: Usage = field(default_factory=Usage)
    text: str | None = None
    """What the engine decoded: evidence for checks, never encoded again."""
    request_id: str | None = None

    def __post_init__(self) -> None:
        _freeze(self, "prompt_token_ids", np.int32)
        _freeze(self, "completion_token_ids", np.int32)
        _freeze(self, "inference_logprobs", np.float32)
        num_tokens = len(self.completion_token_ids)
        if len(self.prompt_token_ids) == 0:
            raise RecordError("Turn.prompt_token_ids: expected at least one token, found none")
        _check_length(self, "inference_logprobs", num_tokens)
        if self.raw_inference_logprobs is not None:
            _freeze(self, "raw_inference_logprobs", np.float32)
            _check_length(self, "raw_inference_logprobs", num_tokens)
        _check_ids(self, "prompt_token_ids")
        _check_ids(self, "completion_token_ids")
        if self.finish_reason is not None and self.finish_reason not in FINISH_REASONS:
            raise RecordError(
                f"Turn.finish_reason: expected one of {', '.join(FINISH_REASONS)}, "
                f"found {self.finish_reason!r}"
            )
        if not isinstance(self.provenance, Provenance):
            raise RecordError(f"Turn.provenance: expected Provenance, found {_kind(self.provenance)}")
        _check_spans(self.policy_versions, num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """The turns of one rollout, in order."""

    trajectory_id: str
    turns: tuple[Turn, ...]
    group_id: str | None = None
    """Trajectories of one prompt share it."""
    reward: float | None = None
    advantage: float = 0.0
    """Given to every sampled token; computed by the user's own code."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", tuple(self.turns))
        _keep_number(self, "reward")
        _keep_number(self, "advantage")
        object.__setattr__(self, "metadata", dict(self.metadata))
        if not self.trajectory_id or not isinstance(self.trajectory_id, str):
            raise RecordError(f"Trajectory.trajectory_id: expected a name, found {self.trajectory_id!r}")
        if not self.turns:
            raise RecordError(f"Trajectory {self.trajectory_id!r}: expected at least one turn, found none")
        for turn in self.turns:
            if not isinstance(turn, Turn):
                raise RecordError(f"Trajectory.turns: expected Turn, found {_kind(turn)}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One trainable flat sequence. Every per-token field has length T; entry t is about token t."""

    token_ids: NDArray[np.int32]
    inference_logprobs: NDArray[np.float32]
    """[T] nats; NaN where not sampled."""
    loss_mask: NDArray[np.bool_]
    """[T]; True = token t is trained."""
    advantages: NDArray[np.float32]
    """[T]; 0 where not sampled."""
    policy_version: NDArray[np.int32]
    """[T]; version of the weights that drew token t; -1 where not sampled or unknown."""
    temperature: NDArray[np.float32]
    """[T]; what token t's logits were divided by in `inference_logprobs`; 1 where not sampled."""
    turn: NDArray[np.int16]
    """[T]; the turn that sampled token t; -1 where not sampled."""
    raw_inference_logprobs: NDArray[np.float32] | None = None
    """[T] nats at temperature 1; NaN where absent."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[T] nats; NaN where not trained."""
    ref_logprobs: NDArray[np.float32] | None = None
    """[T] nats; NaN where not trained."""
    proximal_logprobs: NDArray[np.float32] | None = None
    """[T] nats; NaN where not trained."""
    sample_id: str
    trajectory_id: str
    group_id: str | None = None
    reward: float | None = None
    sibling: int = 0
    """Which of its trajectory's samples this is."""
    num_siblings: int = 1
    """How many samples its trajectory became; more than 1 where a prompt did not extend what came before."""
    provenances: tuple[Provenance, ...]
    """Indexed by `turn`."""
    finish_reasons: tuple[FinishReason | None, ...] = ()
    """Indexed by `turn`; empty where nobody said."""

    def __post_init__(self) -> None:
        for spec in TOKEN_FIELDS:
            if spec.optional and getattr(self, spec.name) is None:
                continue
            _freeze(self, spec.name, spec.dtype)
            _check_length(self, spec.name, len(self.token_ids))
        object.__setattr__(self, "provenances", tuple(self.provenances))
        object.__setattr__(self, "finish_reasons", tuple(self.finish_reasons))
        if len(self.token_ids) == 0:
            raise RecordError(f"Sample {self.sample_id!r}: expected at least one token, found none")
        _check_ids(self, "token_ids")
        _keep_number(self, "reward")
        if not 0 <= self.sibling < self.num_siblings:
            raise RecordError(
                f"Sample {self.sample_id!r}: expected 0 <= sibling < num_siblings, "
                f"found {self.sibling} of {self.num_siblings}"
            )
        if self.turn[0] != -1:
            raise RecordError(
                f"Sample {self.sample_id!r}: expected token 0 to be of a prompt (nothing precedes it that "
                f"could predict it), found it sampled in turn {int(self.turn[0])}"
            )
        last_turn = int(self.turn.max())
        if last_turn >= len(self.provenances) or int(self.turn.min()) < -1:
            raise RecordError(
                f"Sample {self.sample_id!r}: expected turns -1 to {len(self.provenances) - 1} "
                f"(one provenance a turn), found {int(self.turn.min())} to {last_turn}"
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def logprobs_modes(self) -> frozenset[LogprobsMode]:
        """What its turns' logprobs are of; one batch takes one kind."""
        return frozenset(provenance.logprobs_mode for provenance in self.provenances)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a sample was read from: what a finding prints."""

    path: str | None
    """The file; None where it was never stored."""
    index: int
    """Its index in that file, or in the list at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One run of sampled tokens of one turn: the unit of every statistic and every verdict.

    In a `Sample` positions are tokens and `row` is 0; in a `Batch` they are the positions that predict those
    tokens.
    """

    row: int
    start: int
    stop: int
    turn: int


def origins_of(samples: Sized, origins: Sequence[Origin] | None) -> Sequence[Origin]:
    """The origins given, one a sample; without any, the places in the list.

    Raises:
        RecordError: not as many origins as samples.
    """
    if origins is None:
        return [Origin(path=None, index=index) for index in range(len(samples))]
    if len(origins) != len(samples):
        raise RecordError(f"origins: expected {len(samples)}, one a sample, found {len(origins)}")
    return origins


def sampled_segments(turn: NDArray[np.int16], *, row: int = 0) -> list[Segment]:
    """The runs of equal `turn` >= 0 in one row of [T] turn indices.

    Example:
        [-1, 0, 0, -1, 1] -> tokens 1:3 of turn 0 and 4:5 of turn 1
    """
    if not len(turn):
        return []
    edges = (np.flatnonzero(np.diff(turn)) + 1).tolist()
    starts, stops = [0, *edges], [*edges, len(turn)]
    return [
        Segment(row=row, start=start, stop=stop, turn=int(turn[start]))
        for start, stop in zip(starts, stops, strict=True)
        if turn[start] >= 0
    ]


def identical(a: object, b: object) -> bool:
    """Whether two records, or two values of their fields, are the same, bit for bit; NaN equals NaN."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if is_dataclass(a) and not isinstance(a, type):
        return all(identical(getattr(a, spec.name), getattr(b, spec.name)) for spec in fields(a))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


def _freeze(record: object, name: str, dtype: np.dtype[Any] | type[np.generic]) -> None:
    """Keep the field as a read-only view; nothing is cast, nothing is copied."""
    label = f"{type(record).__name__}.{name}"
    value = getattr(record, name)
    if not isinstance(value, np.ndarray):
        raise RecordError(f"{label}: expected a numpy array of {np.dtype(dtype)}, found {_kind(value)}")
    if value.dtype != dtype:
        raise RecordError(f"{label}: expected dtype {np.dtype(dtype)}, found {value.dtype}")
    if value.ndim != 1:
        raise RecordError(f"{label}: expected one dimension, found shape {list(value.shape)}")
    view = value.view()
    view.flags.writeable = False
    object.__setattr__(record, name, view)


def _check_length(record: object, name: str, expected: int) -> None:
    found = len(getattr(record, name))
    if found != expected:
        label = f"{type(record).__name__}.{name}"
        raise RecordError(f"{label}: expected {expected} entries, one a token, found {found}")


def _check_ids(record: object, name: str) -> None:
    ids = getattr(record, name)
    if len(ids) and int(ids.min()) < 0:
        at = int(np.argmax(ids < 0))
        label = f"{type(record).__name__}.{name}"
        raise RecordError(f"{label}: expected ids >= 0, found {int(ids[at])} at token {at}")


def _keep_number(record: object, name: str) -> None:
    """Store a Python float for any real number, so that equal records are identical."""
    value = getattr(record, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise RecordError(f"{type(record).__name__}.{name}: expected a number, found {value!r}")
    object.__setattr__(record, name, float(value))


def _check_spans(spans: Iterable[VersionSpan], num_tokens: int) -> None:
    at = 0
    for span in spans:
        if not at <= span.start < span.stop <= num_tokens:
            raise RecordError(
                f"Turn.policy_versions: expected ordered half-open spans within {num_tokens} tokens, "
                f"found {span.start}:{span.stop} after {at}"
            )
        at = span.stop


def _check_scalar(label: str, value: object, kind: object) -> None:
    allowed = {bool: (bool,), int: (int,), float: (int, float)}[kind]  # type: ignore[index]
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise RecordError(f"{label}: expected {getattr(kind, '__name__', kind)}, found {value!r}")


def _kind(value: object) -> str:
    return type(value).__name__
