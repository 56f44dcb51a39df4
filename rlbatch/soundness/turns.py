"""`check_sound_trajectory`: what a turn shows by itself: usage and text, which no sample keeps, and its end.

It belongs between `parse_response` and `to_samples`. Knows no tokenizer but the `decode` that it is given.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rlbatch.assemble import prefix_findings
from rlbatch.catalogue import finding
from rlbatch.engines.agreement import is_made_of
from rlbatch.engines.lengths import MIN_PLACEHOLDERS
from rlbatch.errors import Finding, RecordError, SoundnessError, Where
from rlbatch.records import Trajectory, Turn
from rlbatch.records.structure import kind_of
from rlbatch.soundness.stops import lost_stop, overrun, passed_stop, says_why

Decode: TypeAlias = Callable[[list[int]], str]
"""Ids to text, such as a tokenizer's `decode`; special tokens may be in it or not."""

MAX_EXPANSIONS = 8
"""How often one place may have been expanded to be taken for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """One turn under test."""

    trajectory_id: str
    index: int
    turn: Turn
    decode: Decode | None

    def where(self, start: int | None = None, stop: int | None = None) -> Where:
        """The turn, or a span of its prompt and completion."""
        return Where(trajectory=self.trajectory_id, turn=self.index, start=start, stop=stop)

    def where_last(self) -> Where:
        """Its last sampled token, or the end of its prompt."""
        end = self.num_prompt + self.num_completion
        return self.where(max(end - 1, self.num_prompt), end)

    @property
    def last(self) -> int | None:
        return int(self.turn.completion_token_ids[-1]) if self.num_completion else None

    @property
    def num_prompt(self) -> int:
        return len(self.turn.prompt_token_ids)

    @property
    def num_completion(self) -> int:
        return len(self.turn.completion_token_ids)


def check_sound_trajectory(trajectory: Trajectory, *, decode: Decode | None = None) -> tuple[Finding, ...]:
    """Everything that the turns of a rollout show by themselves; no fault of theirs raises.

    Tokens in findings are counted in the turn's prompt and completion.

    Args:
        trajectory: its turns in order.
        decode: the tokenizer's; without it texts are not held against ids.

    Raises:
        RecordError: no Trajectory.
    """
    if not isinstance(trajectory, Trajectory):
        raise RecordError(f"trajectory: expected Trajectory, found {kind_of(trajectory)}")
    ended = [
        _Ended(trajectory_id=trajectory.trajectory_id, index=index, turn=turn, decode=decode)
        for index, turn in enumerate(trajectory.turns)
    ]
    found = [each for turn in ended for check in TURN_CHECKS for each in check(turn)]
    return (*found, *prefix_findings(trajectory))


def require_sound_trajectory(trajectory: Trajectory, *, decode: Decode | None = None) -> Trajectory:
    """The same trajectory, or an error that names every fault in it; the arguments of the check.

    Raises:
        SoundnessError: a finding of severity error; warnings pass.
        RecordError: no Trajectory.
    """
    findings = check_sound_trajectory(trajectory, decode=decode)
    errors = [found for found in findings if found.severity == "error"]
    if errors:
        raise SoundnessError.of(*errors)
    return trajectory


def _usage(ended: _Ended) -> Iterator[Finding]:
    """Counts of the engine that are not those of its lists."""
    said, counted = ended.turn.usage.num_completion_tokens, ended.num_completion
    if said is not None and said != counted:
        yield finding(
            "usage-mismatch",
            where=ended.where(ended.num_prompt, ended.num_prompt + counted),
            expected=f"{said} sampled ids, as many as usage counts",
            found=f"{counted} ids: {abs(said - counted)} {'missing' if said > counted else 'too many'}",
        )
    said, counted = ended.turn.usage.num_prompt_tokens, ended.num_prompt
    if said is None or said == counted:
        return
    places, difference = _num_placeholders(ended.turn), abs(said - counted)
    # Expanded twice, thrice or not at all: what is too many is a good part of the run that is there.
    expanded = places > 0 and math.gcd(places, difference) >= max(MIN_PLACEHOLDERS, places / MAX_EXPANSIONS)
    yield finding(
        "placeholder-count" if expanded else "usage-mismatch",
        where=ended.where(0, counted),
        expected=f"{said} ids in the prompt, as many as usage counts",
        found=f"{counted} ids: {difference} {'missing' if said > counted else 'too many'}"
        + (f", and {places} placeholders in a row" if expanded else ""),
    )


def _num_placeholders(turn: Turn) -> int:
    """Length of the longest run of one id in the prompt; 0 where none is long."""
    ids = turn.prompt_token_ids
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(ids)) + 1, [len(ids)]])
    longest = int(np.diff(bounds).max())
    return longest if longest >= MIN_PLACEHOLDERS else 0


def _finish(ended: _Ended) -> Iterator[Finding]:
    """A turn that ended with `stop`, and not with the token that says so."""
    turn = ended.turn
    if turn.finish_reason != "stop":
        return
    at = passed_stop(turn.completion_token_ids, turn.stop_reason, turn.provenance)
    if at is None:
        yield from lost_stop(ended.last, turn.stop_reason, turn.provenance, ended.where_last())
    else:
        first, stop = ended.num_prompt, ended.num_prompt + ended.num_completion
        where, sure = ended.where(first + at + 1, stop), says_why(turn.stop_reason, turn.provenance)
        yield overrun(turn.completion_token_ids, at, first, where, sure=sure)


def _stop_added(ended: _Ended) -> Iterator[Finding]:
    """A turn that was cut off by its length, and yet ends with a stop token."""
    turn, eos = ended.turn, ended.turn.provenance.eos_token_ids
    # With ignore_eos a stop token may stand anywhere, so that one before the last explains it.
    ignored = np.isin(turn.completion_token_ids[:-1], eos).any()
    if turn.finish_reason == "length" and ended.last in eos and not ignored:
        yield finding(
            "finish-mismatch",
            severity="warning",
            where=ended.where_last(),
            expected="no stop token at the end of a turn that ended by its length",
            found=f"id {ended.last}",
            likely="a stop token was put in after a turn that was cut off, and nobody sampled it",
            fix="leave it out, or leave it untrained: it has no logprob",
        )


def _stop_string(ended: _Ended) -> Iterator[Finding]:
    """Text that goes on after the stop string that ended it."""
    stop, text = ended.turn.stop_reason, ended.turn.text
    if not isinstance(stop, str) or not stop or text is None:
        return
    at = text.find(stop)
    rest = len(text) - at - len(stop)
    if at >= 0 and rest > 0:
        yield finding(
            "stop-overrun",
            where=ended.where(ended.num_prompt, ended.num_prompt + ended.num_completion),
            expected="a text that ends with the first stop string, or before it",
            found=f"{rest} characters after it",
        )


def _text(ended: _Ended) -> Iterator[Finding]:
    """A text that its ids do not decode to."""
    text, decode = ended.turn.text, ended.decode
    if not text or decode is None:
        return
    joined = decode(ended.turn.completion_token_ids.tolist())
    if not is_made_of(text, joined):
        yield finding(
            "text-mismatch",
            where=ended.where(ended.num_prompt, ended.num_prompt + ended.num_completion),
            expected="a text that is made of what the ids decode to",
            found=f"a text of {len(text)} characters, {len(joined)} in the decoded ids",
        )


TURN_CHECKS: tuple[Callable[[_Ended], Iterator[Finding]], ...] = (
    _usage,
    _text,
    _finish,
    _stop_added,
    _stop_string,
)
"""Every check on one turn, in the order in which findings are told."""
