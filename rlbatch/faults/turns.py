"""Faults of a turn that no sample keeps: what the engine says of its counts and of its end."""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import numpy as np

from rlbatch.errors import RecordError
from rlbatch.records import Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFault:
    """One way to spoil the last turn of a rollout, after which no other turn can extend it."""

    code: str
    """Of the finding that names it."""
    story: str
    """How it comes about in real pipelines."""
    corrupt: InitVar[Callable[[Turn, np.random.Generator], Turn]]
    """One turn in, its spoilt copy out; the turn itself where it offers no place for this fault."""
    _spoil: Callable[[Turn, np.random.Generator], Turn] = field(init=False, repr=False)
    """`corrupt`, for `plant` alone: by itself it says nothing where it finds no place."""

    def __post_init__(self, corrupt: Callable[[Turn, np.random.Generator], Turn]) -> None:
        object.__setattr__(self, "_spoil", corrupt)

    def plant(
        self, trajectories: Sequence[Trajectory], rng: np.random.Generator, *, share: float = 1.0
    ) -> list[Trajectory]:
        """Copies with `share` of the trajectories spoilt, at least one.

        Raises:
            RecordError: there are no trajectories, or none offers a place for this fault.
        """
        planted = list(trajectories)
        left = max(1, round(share * len(planted)))
        for index in rng.permutation(len(planted)).tolist():
            *before, last = trajectories[index].turns
            spoilt = self._spoil(last, rng) if left else last
            if spoilt is not last:
                planted[index] = replace(trajectories[index], turns=(*before, spoilt))
                left -= 1
        if all(new is old for new, old in zip(planted, trajectories, strict=True)):
            raise RecordError(
                f"plant: expected a place for {self.code!r}, found none in {len(planted)} trajectories"
            )
        return planted


def _cut(turn: Turn, kept: slice) -> Turn:
    """A copy with some of its completion; what the engine says besides stays."""
    columns: dict[str, Any] = {
        name: getattr(turn, name)[kept]
        for name in ("completion_token_ids", "inference_logprobs", "raw_inference_logprobs")
        if getattr(turn, name) is not None
    }
    return replace(turn, policy_versions=(), routed_experts=None, routed_experts_start=0, **columns)


def _usage_mismatch(turn: Turn, rng: np.random.Generator) -> Turn:
    num_tokens = len(turn.completion_token_ids)
    if num_tokens < 3:
        return turn
    # The front is lost, and usage is the only one that still counts it.
    lost = int(rng.integers(1, num_tokens - 1))
    usage = replace(turn.usage, num_completion_tokens=num_tokens)
    return replace(_cut(turn, slice(lost, None)), usage=usage)


def _finish_mismatch(turn: Turn, rng: np.random.Generator) -> Turn:
    # The stop token is lost from ids and logprobs alike, and from the counts that were made of them.
    eos = turn.provenance.eos_token_ids
    ids = turn.completion_token_ids
    if turn.finish_reason != "stop" or len(ids) < 2 or ids[-1] not in eos or ids[-2] in eos:
        return turn
    return replace(_cut(turn, slice(-1)), usage=replace(turn.usage, num_completion_tokens=None))


def _stop_overrun(turn: Turn, rng: np.random.Generator) -> Turn:
    if not turn.text:
        return turn
    at = int(rng.integers(len(turn.text)))
    stop = turn.text[at]
    # Found where it stands first, and followed by something.
    if turn.text.find(stop) == len(turn.text) - 1:
        return turn
    return replace(turn, finish_reason="stop", stop_reason=stop)


def _text_mismatch(turn: Turn, rng: np.random.Generator) -> Turn:
    # Another reply's text: the words of this one from back to front.
    words = (turn.text or "").split()
    other = " ".join(reversed(words))
    return replace(turn, text=other) if len(set(words)) > 3 else turn


def _placeholder_count(turn: Turn, rng: np.random.Generator) -> Turn:
    num_places = int(rng.integers(16, 400))
    first, rest = turn.prompt_token_ids[:1], turn.prompt_token_ids[1:]
    image = np.full(num_places, int(turn.prompt_token_ids.max()) + 1, np.int32)
    usage = replace(turn.usage, num_prompt_tokens=len(turn.prompt_token_ids) + num_places)
    prompt = np.concatenate([first, image, image, rest])
    return replace(turn, prompt_token_ids=prompt, usage=usage, routed_experts=None, routed_experts_start=0)


TURNS = (
    TurnFault(
        code="usage-mismatch",
        story="Chunks in which the tool parser returned nothing lost their ids.",
        corrupt=_usage_mismatch,
    ),
    TurnFault(
        code="finish-mismatch",
        story="The ids were encoded again from text, and the last logprob was cut to fit.",
        corrupt=_finish_mismatch,
    ),
    TurnFault(
        code="stop-overrun",
        story="The engine went on after the stop string.",
        corrupt=_stop_overrun,
    ),
    TurnFault(
        code="text-mismatch",
        story="A retry's text was kept beside the first reply's ids.",
        corrupt=_text_mismatch,
    ),
    TurnFault(
        code="placeholder-count",
        story="Placeholders that were already expanded were expanded again.",
        corrupt=_placeholder_count,
    ),
)
