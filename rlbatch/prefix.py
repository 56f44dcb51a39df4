"""Where a prompt leaves the sequence that it should extend, and what kind of break that is, by ids alone.

    kind               the earlier sequence                     the prompt
    stripped thinking  a run inside a completion                left out, then it goes on
    re-tokenised       ids of a completion                      other ids, then it goes on
    template suffix    right after, or before, a completion     template ids lost or put in
    tool boundary      ids between turns, or across the end     other ids, then it goes on
    of a completion
    shortened          more                                     ends there
    another prompt     the first prompt                         other ids
    rewritten          ids of a completion                      nothing of the rest comes again

A prompt goes on where the next `ANCHOR` ids agree, or all that are left; right after a completion fewer do.
Knows no tokenizer: that a run is thinking is told by its place, not by its text. Knows nothing of records.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

BreakKind: TypeAlias = Literal[
    "stripped thinking",
    "re-tokenised",
    "template suffix",
    "tool boundary",
    "shortened",
    "another prompt",
    "rewritten",
]

ANCHOR = 8
"""So many equal ids in a row are no coincidence: BPE settles within two or three after a change."""

SUFFIX_ANCHOR = 4
"""At the edge of a turn fewer will do, where no more than so many ids are lost or put in."""

MIN_ANCHOR = 2
"""One id that is left, mostly a stop token, comes again in any conversation and proves nothing."""

MAX_REPLACED = 64
"""A replaced run is looked for within so many ids on each side; left-out and put-in runs at any length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """The first difference between an earlier sequence and a prompt."""

    kind: BreakKind
    start: int
    """Where both begin to differ, counted in either."""
    stop: int
    """One past the earlier sequence's ids that do not come again; its length where it never goes on."""
    prompt_stop: int
    """One past the prompt's ids that stand instead; its length where it never goes on."""
    resumes: bool
    """Whether the earlier sequence goes on in the prompt."""


def num_common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Ids at the start that two sequences share."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def find_break(
    earlier: NDArray[np.int32], sampled: NDArray[np.bool_], prompt: NDArray[np.int32]
) -> Break | None:
    """The first break of a prompt with what came before; None where the prompt extends it.

    Args:
        earlier: [T] ids of the sequence so far, prompts and completions.
        sampled: [T]; True = the engine drew this one.
        prompt: [P] ids of the next turn's prompt.

    Example:
        earlier [1 5 | 3 4 7 2] (the last four sampled), prompt [1 5 7 2 9]:
        stripped thinking, start 2, stop 4, prompt_stop 2
    """
    at = num_common(earlier, prompt)
    if at == len(earlier):
        return None
    if at == len(prompt):
        return Break(kind="shortened", start=at, stop=len(earlier), prompt_stop=at, resumes=False)
    rest, new = earlier[at:], prompt[at:]
    after_completion = at > 0 and bool(sampled[at - 1]) and not sampled[at]
    resumed = (_suffix(rest, new) if after_completion else None) or _resumption(rest, new)
    resumes = resumed is not None
    num_lost, num_new = resumed or (len(earlier) - at, len(prompt) - at)
    kind = _kind(sampled, at, num_lost, num_new, resumes=resumes)
    return Break(kind=kind, start=at, stop=at + num_lost, prompt_stop=at + num_new, resumes=resumes)


def _suffix(rest: NDArray[np.int32], prompt: NDArray[np.int32]) -> tuple[int, int] | None:
    """A few ids lost or put in right after a completion; a template that does so does it in every turn.

    Short turns leave no room for a whole anchor until the next one.
    """
    length = min(SUFFIX_ANCHOR, len(rest) - 1, len(prompt) - 1)
    if length < MIN_ANCHOR:
        return None
    for moved in range(1, SUFFIX_ANCHOR + 1):
        for lost, new in ((moved, 0), (0, moved)):
            ahead = rest[lost : lost + length], prompt[new : new + length]
            if len(ahead[0]) == length and np.array_equal(*ahead):
                return lost, new
    return None


def _resumption(rest: NDArray[np.int32], prompt: NDArray[np.int32]) -> tuple[int, int] | None:
    """Ids to skip on each side until both go on alike, the fewest in all; None where they never do."""

    def goes_on(lost: int, new: int) -> bool:
        # Near the end of the earlier sequence less than an anchor is left, and all of that has to agree.
        length = min(ANCHOR, len(rest) - lost)
        if new and length < MIN_ANCHOR:
            return False
        return np.array_equal(rest[lost : lost + length], prompt[new : new + length])

    left_out = ((lost, 0) for lost in _places(rest[1:], prompt[0]) if goes_on(lost, 0))
    put_in = ((0, new) for new in _places(prompt[1:], rest[0]) if goes_on(0, new))
    found = [next(left_out, None), next(put_in, None)]
    for lost in range(1, min(MAX_REPLACED, len(rest))):
        replaced = ((lost, new) for new in _places(prompt[1:MAX_REPLACED], rest[lost]) if goes_on(lost, new))
        found.append(next(replaced, None))
    return min((each for each in found if each is not None), key=sum, default=None)


def _places(ids: NDArray[np.int32], wanted: np.int32) -> list[int]:
    """Where an id stands in a sequence of which the first was cut off."""
    places: list[int] = (np.flatnonzero(ids == wanted) + 1).tolist()
    return places


def _kind(sampled: NDArray[np.bool_], at: int, num_lost: int, num_new: int, *, resumes: bool) -> BreakKind:
    first = int(sampled.argmax()) if sampled.any() else len(sampled)
    after_completion = at > 0 and bool(sampled[at - 1]) and not sampled[at]
    before_completion = bool(sampled[at]) and (at == 0 or not sampled[at - 1])
    if at < first:
        return "another prompt"
    if not sampled[at]:
        one_sided = resumes and 0 in (num_lost, num_new)
        return "template suffix" if after_completion and one_sided else "tool boundary"
    if not resumes:
        # A lost stop token, or an end too short to tell whether anything of it comes again.
        return "re-tokenised" if num_lost < ANCHOR else "rewritten"
    if before_completion and num_lost == 0:
        return "template suffix"
    stop = at + num_lost
    if not sampled[at:stop].all():
        return "tool boundary"
    goes_on_sampled = stop < len(sampled) and bool(sampled[stop])
    return "stripped thinking" if num_new == 0 and goes_on_sampled else "re-tokenised"
