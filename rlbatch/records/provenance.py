"""`SamplingParams` and `Provenance`: how tokens were drawn, and what their logprobs therefore are.

An engine's reply does not say it. The rules of what may be compared with what are here and nowhere else.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from rlbatch.errors import RecordError
from rlbatch.records.structure import check_choice, check_text, keep_scalar, keep_tuple, kind_of, scalar

LogprobsMode: TypeAlias = Literal["processed", "raw", "unknown"]
Purpose: TypeAlias = Literal["train", "train-truncated", "audit"]

PURPOSES: tuple[Purpose, ...] = ("train", "train-truncated", "audit")
"""`train-truncated` is training that also takes tokens drawn from kept sets: it asks for trainer logprobs
renormalised over the trainer's own, and for the loss that follows from them."""
LOGPROBS_MODES: tuple[LogprobsMode, ...] = ("processed", "raw", "unknown")

KEPT_SET_ENGINES = ("vllm",)
"""Engines whose rule for kept sets the trainer follows: order, ties and the edge of a nucleus differ between
engines. SGLang reports no logprobs after truncation at all."""

_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (
        lambda value: value == 0 or 1e-30 <= value <= 1e30,
        "0, or a number that float32 divides by",
    ),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and <= 1"),
    "top_k": (lambda value: value >= 0, ">= 0 (0 is off)"),
    "min_p": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "finite and above 0"),
    "presence_penalty": (math.isfinite, "a finite number"),
    "frequency_penalty": (math.isfinite, "a finite number"),
    "min_tokens": (lambda value: value >= 0, ">= 0"),
}


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
            keep_scalar(self, spec.name, spec.type)  # type: ignore[arg-type]
        for name, (holds, expected) in _RANGES.items():
            value = getattr(self, name)
            # Written so that NaN is refused too.
            if not holds(value):
                raise RecordError(f"SamplingParams.{name}: expected {expected}, found {value}")

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
    """Ids that tokenizer and model know; one at or above it is an error. The head may have more rows."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    """What every prompt begins with, once; None where the model has none, or nobody knows."""
    routing_shape: tuple[int, int] | None = None
    """(layers, experts a token), where a record of routed experts does not say it (SGLang, Fireworks)."""

    def __post_init__(self) -> None:
        check_choice("Provenance.logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        if not isinstance(self.sampling, SamplingParams):
            raise RecordError(f"Provenance.sampling: expected SamplingParams, found {kind_of(self.sampling)}")
        check_text(self, "engine")
        for name in ("engine_version", "model", "tokenizer_fingerprint", "dtype"):
            check_text(self, name, optional=True)
        if self.vocab_size is not None:
            keep_scalar(self, "vocab_size", int)
            if self.vocab_size < 1:
                raise RecordError(f"Provenance.vocab_size: expected >= 1, found {self.vocab_size}")
        _keep_integers(self, "eos_token_ids")
        keep_scalar(self, "bos_token_id", int, optional=True)
        if self.routing_shape is not None:
            _keep_integers(self, "routing_shape")
            if len(self.routing_shape) != 2 or min(self.routing_shape) < 1:
                found = self.routing_shape
                raise RecordError(
                    f"Provenance.routing_shape: expected (layers, experts a token), found {found}"
                )

    @property
    def divisor(self) -> float:
        """What the logits were divided by: the temperature, and 1 where decoding was greedy."""
        return 1.0 if self.sampling.greedy else self.sampling.temperature

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
    def keeps_set(self) -> bool:
        """Behaviour logprobs renormalised over kept sets, which a trainer can find in its own logits."""
        return (
            self.engine in KEPT_SET_ENGINES
            and self.logprobs_mode == "processed"
            and self.sampling.truncated
            and not self.sampling.reshaped
        )

    @property
    def auditable(self) -> bool:
        """Values that can be compared with a trainer's.

        Raw ones at temperature 1 whatever was in force, except a grammar: its mask reaches vLLM's raw values.
        Those over kept sets where the trainer's can be taken over the same.
        """
        if self.logprobs_mode == "raw":
            return not self.sampling.structured_output
        if self.sampling.greedy:
            return self.logprobs_mode == "processed" and not self.sampling.reshaped
        return self.trainable or self.keeps_set

    def renormalised(self, purpose: Purpose) -> bool:
        """Whether the trainer's logprobs of the turn are taken over its kept sets for this purpose."""
        return purpose != "train" and self.keeps_set

    def comparable(self, purpose: Purpose) -> bool:
        """Whether the turn's logprobs are judged against a trainer's for this purpose."""
        if purpose == "audit":
            return self.auditable
        return self.trainable or self.renormalised(purpose)


def _keep_integers(record: Provenance, name: str) -> None:
    keep_tuple(record, name)
    numbers = tuple(scalar(f"Provenance.{name}", each, int) for each in getattr(record, name))
    object.__setattr__(record, name, numbers)
