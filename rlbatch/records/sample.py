"""`Sample`: one trainable flat sequence, with the runs of sampled tokens in it, and where it came from."""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError
from rlbatch.records.media import MediaArray, check_media
from rlbatch.records.provenance import LogprobsMode, Provenance
from rlbatch.records.structure import (
    check_choice,
    check_ids,
    check_length,
    check_text,
    freeze,
    freeze_experts,
    keep_scalar,
    keep_tuple,
    kind_of,
)
from rlbatch.records.token_fields import TOKEN_FIELDS, UNKNOWN_VERSION
from rlbatch.records.turn import FINISH_REASONS, FinishReason, StopReason, check_stop_reason

MAX_SIBLINGS = 2**63 - 1
"""What a shard's int64 holds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One trainable flat sequence. Every one of `TOKEN_FIELDS` has length T; entry t is about token t."""

    token_ids: NDArray[np.int32]
    inference_logprobs: NDArray[np.float32]
    """[T] nats; NaN where not sampled."""
    loss_mask: NDArray[np.bool_]
    """[T]; True = token t is trained."""
    advantages: NDArray[np.float32]
    """[T]; 0 where not sampled; NaN where nobody has said it, which is not trained."""
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
    routed_experts: NDArray[np.integer] | None = None
    """[T-1, L, K], as the engine counts experts; row t is the pass over token t, which predicts token t + 1.
    Not one of `TOKEN_FIELDS`: the last token was never passed through."""
    media: tuple[MediaArray, ...] = ()
    """Inputs besides tokens, each name once; such samples are not packed."""
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
    stop_reasons: tuple[StopReason | None, ...] = ()
    """Indexed by `turn`; None where the engine said nothing. Empty where nobody kept them: then no turn's end
    is held against its finish reason."""
    segments: "tuple[Segment, ...]" = field(init=False, repr=False)
    """Its runs of sampled tokens of one turn each, in order. Found once, where it is made."""
    segment_versions: tuple[int, ...] = field(init=False, repr=False)
    """[G] the one version that drew each segment; -1 where unknown or more than one."""
    num_loss_tokens: int = field(init=False, repr=False)
    """Trained tokens, but for token 0, which nothing predicts."""

    def __post_init__(self) -> None:
        for spec in TOKEN_FIELDS:
            if spec.optional and getattr(self, spec.name) is None:
                continue
            freeze(self, spec.name, spec.dtype)
            check_length(self, spec.name, len(self.token_ids))
        if self.routed_experts is not None:
            freeze_experts(self, "routed_experts", len(self.token_ids) - 1)
        for name in ("media", "provenances", "finish_reasons", "stop_reasons"):
            keep_tuple(self, name)
        check_media(self.media)
        self._check_names()
        self._check_tokens()
        self._derive()

    @classmethod
    def unchecked(cls, fields: Mapping[str, Sequence[Any]], num_samples: int) -> "list[Sample]":
        """Samples of all their fields, derived ones too, which were checked for all at once.

        Args:
            fields: of every name a list with one value a sample; arrays are read-only, and of the dtypes and
                lengths of `TOKEN_FIELDS`.
            num_samples: how many.
        """
        samples = [object.__new__(cls) for _ in range(num_samples)]
        # Field by field: a dict a sample would be thousands of objects for the garbage collector to visit.
        for name, values in fields.items():
            for sample, value in zip(samples, values, strict=True):
                object.__setattr__(sample, name, value)
        return samples

    def copied(self, copies: Mapping[str, NDArray[Any]]) -> "Sample":
        """The same sample with arrays that are views of nothing it was a view of.

        Args:
            copies: field -> [T] of its dtype and its values, which is kept; other arrays are copied.
        """
        copy = object.__new__(Sample)
        for name in _FIELD_NAMES:
            value = copies.get(name)
            if value is None:
                value = getattr(self, name)
                value = value.copy() if isinstance(value, np.ndarray) else value
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            object.__setattr__(copy, name, value)
        return copy

    def _derive(self) -> None:
        segments = tuple(sampled_segments(self.turn))
        versions = tuple(_one_version(self.policy_version[part.start : part.stop]) for part in segments)
        object.__setattr__(self, "segments", segments)
        object.__setattr__(self, "segment_versions", versions)
        object.__setattr__(self, "num_loss_tokens", int(np.count_nonzero(self.loss_mask[1:])))

    def _check_names(self) -> None:
        check_text(self, "sample_id")
        check_text(self, "trajectory_id")
        check_text(self, "group_id", optional=True)
        keep_scalar(self, "reward", float, optional=True)
        for name in ("sibling", "num_siblings"):
            keep_scalar(self, name, int)
        if not 0 <= self.sibling < self.num_siblings <= MAX_SIBLINGS:
            raise RecordError(
                f"Sample {self.sample_id!r}: expected 0 <= sibling < num_siblings, "
                f"found {self.sibling} of {self.num_siblings}"
            )
        for provenance in self.provenances:
            if not isinstance(provenance, Provenance):
                raise RecordError(f"Sample.provenances: expected Provenance, found {kind_of(provenance)}")
        for reason in self.finish_reasons:
            if reason is not None:
                check_choice("Sample.finish_reasons", reason, FINISH_REASONS)
        for stop in self.stop_reasons:
            check_stop_reason("Sample.stop_reasons", stop)

    def _check_tokens(self) -> None:
        if len(self.token_ids) == 0:
            raise RecordError(f"Sample {self.sample_id!r}: expected at least one token, found none")
        check_ids(self, "token_ids")
        if self.turn[0] != -1:
            raise RecordError(
                f"Sample {self.sample_id!r}: expected token 0 to be of a prompt (nothing precedes it that "
                f"could predict it), found it sampled in turn {int(self.turn[0])}"
            )
        first, last = int(self.turn.min()), int(self.turn.max())
        if last >= len(self.provenances) or first < -1:
            raise RecordError(
                f"Sample {self.sample_id!r}: expected turns -1 to {len(self.provenances) - 1} "
                f"(one provenance a turn), found {first} to {last}"
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


# A named tuple: a batch makes thousands, and frozen dataclasses took a tenth of collation's time.
class Segment(NamedTuple):
    """One run of sampled tokens of one turn: the unit of every statistic and every verdict.

    In a `Sample` positions are tokens and `row` is 0; in a `Batch` they are the positions that predict those
    tokens.
    """

    row: int
    start: int
    stop: int
    turn: int


def check_samples(samples: object) -> None:
    """Refuse what is not a sequence of samples: a generator would be empty the second time.

    Raises:
        RecordError: it is something else, or has something else in it.
    """
    if not isinstance(samples, Sequence):
        raise RecordError(f"samples: expected a sequence of Sample, found {kind_of(samples)}")
    for index, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise RecordError(f"samples[{index}]: expected Sample, found {kind_of(sample)}")


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


_FIELD_NAMES = tuple(spec.name for spec in fields(Sample))


def _one_version(versions: NDArray[np.int32]) -> int:
    first = versions[0]
    return int(first) if (versions == first).all() else UNKNOWN_VERSION


def sampled_segments(turn: NDArray[np.int16], *, row: int = 0) -> list[Segment]:
    """The runs of equal `turn` >= 0 in one row of [T] turn indices.

    Example:
        [-1, 0, 0, -1, 1] -> tokens 1:3 of turn 0 and 4:5 of turn 1
    """
    if not len(turn):
        return []
    edges = (np.flatnonzero(turn[1:] != turn[:-1]) + 1).tolist()
    starts, stops = [0, *edges], [*edges, len(turn)]
    return [
        Segment(row=row, start=start, stop=stop, turn=int(turn[start]))
        for start, stop in zip(starts, stops, strict=True)
        if turn[start] >= 0
    ]
