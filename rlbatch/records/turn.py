"""`Turn` and `Trajectory`: what an engine was asked and what it drew, one call at a time."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError
from rlbatch.records.provenance import Provenance
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

FinishReason: TypeAlias = Literal["stop", "length", "abort", "tool_calls"]

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "tool_calls")

MAX_TURNS = 2**15
"""Turns of a trajectory that an int16 of `Sample.turn` counts, from 0."""

StopReason: TypeAlias = int | str
"""The stop token's id or the stop string that ended a turn, as the engine said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Half-open span of a turn's completion tokens that one version of the weights drew."""

    label: str
    """The engine's own name for the version."""
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not isinstance(self.label, str):
            raise RecordError(f"VersionSpan.label: expected text, found {kind_of(self.label)}")
        keep_scalar(self, "start", int)
        keep_scalar(self, "stop", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts that the engine reported: evidence for checks, never a source of lengths."""

    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None

    def __post_init__(self) -> None:
        keep_scalar(self, "num_prompt_tokens", int, optional=True)
        keep_scalar(self, "num_completion_tokens", int, optional=True)


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
    stop_reason: StopReason | None = None
    """None where the engine said nothing: some do where the main EOS ended it."""
    policy_versions: tuple[VersionSpan, ...] = ()
    """Empty where the engine said nothing."""
    routed_experts: NDArray[np.integer] | None = None
    """[P + C - 1 - start, L, K], as the engine counts experts; row r is the pass over token start + r, which
    predicts the next one. None where the engine did not say."""
    routed_experts_start: int = 0
    """Token of the first row; 0 where there are none. A next turn's is T - 1 of the turn before."""
    provenance: Provenance
    usage: Usage = field(default_factory=Usage)
    text: str | None = None
    """What the engine decoded: evidence for checks, never encoded again."""
    request_id: str | None = None

    def __post_init__(self) -> None:
        freeze(self, "prompt_token_ids", np.int32)
        freeze(self, "completion_token_ids", np.int32)
        freeze(self, "inference_logprobs", np.float32)
        num_tokens = len(self.completion_token_ids)
        if len(self.prompt_token_ids) == 0:
            raise RecordError("Turn.prompt_token_ids: expected at least one token, found none")
        check_length(self, "inference_logprobs", num_tokens)
        if self.raw_inference_logprobs is not None:
            freeze(self, "raw_inference_logprobs", np.float32)
            check_length(self, "raw_inference_logprobs", num_tokens)
        self._check_routing(num_tokens)
        check_ids(self, "prompt_token_ids")
        check_ids(self, "completion_token_ids")
        if self.finish_reason is not None:
            check_choice("Turn.finish_reason", self.finish_reason, FINISH_REASONS)
        check_stop_reason("Turn.stop_reason", self.stop_reason)
        for name, kind in (("provenance", Provenance), ("usage", Usage)):
            if not isinstance(getattr(self, name), kind):
                found = kind_of(getattr(self, name))
                raise RecordError(f"Turn.{name}: expected {kind.__name__}, found {found}")
        keep_tuple(self, "policy_versions")
        _check_spans(self.policy_versions, num_tokens)

    def _check_routing(self, num_tokens: int) -> None:
        keep_scalar(self, "routed_experts_start", int)
        start = self.routed_experts_start
        most = len(self.prompt_token_ids) if self.routed_experts is not None else 0
        if not 0 <= start <= most:
            raise RecordError(f"Turn.routed_experts_start: expected 0 to {most}, found {start}")
        if self.routed_experts is not None:
            freeze_experts(self, "routed_experts", len(self.prompt_token_ids) + num_tokens - 1 - start)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """The turns of one rollout, in order."""

    trajectory_id: str
    turns: tuple[Turn, ...]
    group_id: str | None = None
    """Trajectories of one prompt share it."""
    reward: float | None = None
    advantage: float | None = None
    """Given to every sampled token; computed by the user's own code. None: not known, and not trained."""

    def __post_init__(self) -> None:
        keep_tuple(self, "turns")
        keep_scalar(self, "reward", float, optional=True)
        keep_scalar(self, "advantage", float, optional=True)
        known = self.advantage
        if known is not None and math.isfinite(known) and abs(known) > float(np.finfo(np.float32).max):
            raise RecordError(f"Trajectory.advantage: expected a number that float32 holds, found {known}")
        check_text(self, "trajectory_id")
        check_text(self, "group_id", optional=True)
        if not 1 <= len(self.turns) <= MAX_TURNS:
            raise RecordError(
                f"Trajectory {self.trajectory_id!r}: expected at least one turn and at most {MAX_TURNS}, "
                f"found {len(self.turns)}"
            )
        for turn in self.turns:
            if not isinstance(turn, Turn):
                raise RecordError(f"Trajectory.turns: expected Turn, found {kind_of(turn)}")


def check_stop_reason(label: str, value: object) -> None:
    """Refuse what is no id, no text and not None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, str))):
        raise RecordError(f"{label}: expected a token id, a stop string or None, found {kind_of(value)}")


def _check_spans(spans: Iterable[VersionSpan], num_tokens: int) -> None:
    at = 0
    for span in spans:
        if not isinstance(span, VersionSpan):
            raise RecordError(f"Turn.policy_versions: expected VersionSpan, found {kind_of(span)}")
        if not at <= span.start < span.stop <= num_tokens:
            raise RecordError(
                f"Turn.policy_versions: expected ordered half-open spans within {num_tokens} tokens, "
                f"found {span.start}:{span.stop} after {at}"
            )
        at = span.stop
