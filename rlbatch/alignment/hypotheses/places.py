"""Values of other places: of a neighbouring token, from some token on, or of another row of the batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Context, Evidence
from rlbatch.alignment.lags import Shift, shift_path, whole_shift
from rlbatch.alignment.limits import (
    LAG_ACCEPTED_SHARE,
    LAG_VOTE,
    PATH_LAGS,
    ROWS_CANDIDATES,
    ROWS_FAR_MIN_TOKENS,
    ROWS_HEAD,
    ROWS_MIN_TOKENS,
    ROWS_MIN_VOTES,
    ROWS_OFF,
    RULE_MIN_ROWS,
    RULE_MIN_VALUES,
    RULE_MIN_VALUES_ALL_MOVED,
)
from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Where
from rlbatch_kernels import RESIDUAL_CLIP

Values = NDArray[np.float64]


def shifted_from(evidence: Evidence) -> Finding | None:
    """Other lags explain the segment from some token on, or a stretch of it, and lag 0 the rest."""
    path = shift_path(evidence)
    if not path:
        return None
    if len(path) == 1 and path[0].stop < len(evidence.trained):
        return _shift_finding("shifted", evidence, path[0])
    first, last = path[0], path[-1]
    places = ", ".join(
        f"lag {shift.lag:+d} from token {evidence.first_token + shift.start} on" for shift in path[1:]
    )
    whole = Shift(lag=first.lag, rivals=first.rivals, start=first.start, stop=last.stop)
    return _shift_finding("shifted-from", evidence, whole, more=f"; then {places}" if places else "")


def shifted(evidence: Evidence) -> Finding | None:
    """Another lag than 0 explains the whole segment."""
    shift = whole_shift(evidence)
    if shift is None:
        return None
    if abs(shift.lag) > max(PATH_LAGS):
        # A row that repeats itself fits itself at many far places.
        if shift.rivals:
            return None
        # So far away, another row may fit as well, and better.
        row = _best_row(evidence)
        if row is not None and row.left < evidence.residuals((shift.lag,))[shift.lag]:
            return None
    return _shift_finding("shifted", evidence, shift)


def _shift_finding(code: str, evidence: Evidence, shift: Shift, more: str = "") -> Finding:
    stretch = evidence.part(shift.start, shift.stop)
    residuals = stretch.residuals((0, shift.lag, *shift.rivals))
    rivals = "".join(f", {residuals[lag]:.3g} at lag {lag:+d}" for lag in shift.rivals)
    is_whole = shift.stop - shift.start == len(evidence.trained)
    return finding(
        code,
        where=stretch.place,
        expected="trainer and inference logprobs agree best at lag 0",
        found=f"mean |log_ratio| {residuals[0]:.3g} nats at lag 0, {residuals[shift.lag]:.3g} at lag "
        f"{shift.lag:+d}{rivals}, over {int(stretch.usable.sum())} tokens"
        + (": the row repeats itself, so which it is cannot be told" if rivals else "")
        + more,
        likely=_likely(shift.lag) if code == "shifted" and is_whole else None,
    )


def _likely(lag: int) -> str:
    entries = "an entry" if abs(lag) == 1 else f"{abs(lag)} entries"
    if lag < 0:
        return f"the list of logprobs has {entries} in front that the list of ids lost"
    return f"the list of logprobs lost {entries} in front that the list of ids still has"


def shifted_by_rule(
    suspects: Mapping[int, Evidence], shifts: Mapping[int, Shift], everyone: Sequence[Evidence]
) -> dict[int, Finding]:
    """Rows whose lags follow their prompt, their padding or their number; by the key of the segment.

    Args:
        suspects: evidence of every segment that is worth a look.
        shifts: the lag of each of them that one lag explains.
        everyone: evidence of all segments of the batch, by key.
    """
    certain = [key for key in shifts if not shifts[key].rivals]
    in_place = [key for key in range(len(everyone)) if key not in suspects]
    # One row that is off follows any rule.
    if len({everyone[key].context.index for key in certain}) < 2:
        return {}
    for name, quantity in RULES:
        for sign in (1, -1):
            constants = {shifts[key].lag - sign * quantity(everyone[key].context) for key in certain}
            if len(constants) != 1:
                continue
            (constant,) = constants
            lags = [constant + sign * quantity(each.context) for each in everyone]
            kept = [key for key in in_place if lags[key] == 0]
            if any(_should_show(everyone[key], lags[key]) for key in in_place):
                continue
            moved, still = ([everyone[key].context for key in keys] for keys in (certain, kept))
            if not _is_a_rule(moved, still, quantity):
                continue
            told = [key for key in shifts if lags[key] in (shifts[key].lag, *shifts[key].rivals)]
            more = (
                f"; the lag is {'minus ' if sign < 0 else ''}{name} {constant:+d}, "
                f"in {len(told) + len(kept)} turns"
            )
            return {key: _shift_finding("shifted-by-rule", suspects[key], shifts[key], more) for key in told}
    return {}


def _is_a_rule(
    moved: Sequence[Context], still: Sequence[Context], quantity: Callable[[Context], int]
) -> bool:
    """Whether enough rows follow it, and differ in what it goes by: where none is left in place, more so."""
    rows = {context.index: quantity(context) for context in (*moved, *still)}
    least = RULE_MIN_VALUES if still else RULE_MIN_VALUES_ALL_MOVED
    return len(rows) >= RULE_MIN_ROWS and len(set(rows.values())) >= least


def _should_show(evidence: Evidence, lag: int) -> bool:
    """Whether a segment is long enough to show a lag, so that one without it contradicts the rule."""
    return lag != 0 and int(evidence.usable.sum()) >= abs(lag) + 2 * ROWS_MIN_TOKENS


RULES: tuple[tuple[str, Callable[[Context], int]], ...] = (
    ("its prompt's length", lambda context: context.prompt_length),
    ("its padding", lambda context: context.padding),
    ("its number in the batch", lambda context: context.index),
)
"""What a lag may follow, in words and as a number."""


def rows_permuted(evidence: Evidence) -> Finding | None:
    """The values are those of another segment of the batch, or of the others that `rows` has."""
    row = _best_row(evidence)
    if row is None:
        return None
    owner = row.owner
    tokens = f"tokens {owner.start}:{owner.stop}"
    if owner.batch != evidence.place.batch:
        tokens += f" of micro-batch {owner.batch}"
    return finding(
        "rows-permuted",
        where=evidence.place,
        expected="each row's logprobs agree best with its own trainer logprobs",
        found=f"mean |log_ratio| {row.off:.3g} nats to its own, {row.left:.3g} to those of sample "
        f"{owner.sample}, trajectory {owner.trajectory!r}, turn {owner.turn}, {tokens}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Another segment that explains what the own one does not."""

    owner: Where
    off: float
    """Mean clipped |difference| to the own trainer logprobs, nats."""
    left: float
    """The same to the other's."""


def _best_row(evidence: Evidence) -> _Row | None:
    num_usable = int(evidence.usable.sum())
    is_far = not evidence.current or evidence.floor is None
    needed = ROWS_FAR_MIN_TOKENS if is_far else ROWS_MIN_TOKENS
    if not evidence.comparable or num_usable < needed:
        return None
    others = evidence.rows().everyone
    fits = []
    for at in _candidates(evidence):
        own, errors = _against(evidence, others[at])
        # All that the row was given must be there in the other one.
        if others[at].place != evidence.place and len(errors) >= max(needed, num_usable / 2):
            fits.append((float(errors.mean()), float(own.mean()), at))
    if not fits:
        return None
    left, off, best = min(fits)
    if left > min(evidence.most_left, LAG_ACCEPTED_SHARE * off) or off < ROWS_OFF:
        return None
    # A row whose own values are in place has given none away: the two rows are of one text.
    if _is_in_place(others[best]):
        return None
    witnessed = _row_witnessed(*_against(evidence, others[best]))
    return _Row(owner=others[best].place, off=off, left=left) if witnessed else None


def _is_in_place(evidence: Evidence) -> bool:
    """Whether a segment fits its own trainer logprobs to within noise."""
    usable = evidence.usable
    return bool(usable.any() and evidence.at_zero()[usable].mean() <= min(ROWS_OFF, evidence.most_left))


def _candidates(evidence: Evidence) -> list[int]:
    """The few segments whose first tokens fit best."""
    heads = evidence.rows().heads
    own = np.where(evidence.usable, evidence.inference, np.nan)[:ROWS_HEAD]
    errors = np.minimum(np.abs(heads[:, : len(own)] - own), RESIDUAL_CLIP)
    num = np.isfinite(errors).sum(axis=1)
    means = np.where(num > 0, np.nansum(errors, axis=1) / np.maximum(num, 1), np.inf)
    best: list[int] = np.argsort(means, kind="stable")[:ROWS_CANDIDATES].tolist()
    return best


def _against(evidence: Evidence, other: Evidence) -> tuple[Values, Values]:
    """Clipped |difference| of the tokens that both have: to the own trainer logprobs, and to the other's."""
    length = min(len(other.trainer), len(evidence.trainer))
    both = evidence.usable[:length] & other.trained[:length] & np.isfinite(other.trainer[:length])
    apart = evidence.inference[:length][both] - other.trainer[:length][both]
    return evidence.at_zero()[:length][both], np.minimum(np.abs(apart), RESIDUAL_CLIP)


def _row_witnessed(own: Values, errors: Values) -> bool:
    """Whether single tokens prefer the other row, and hardly any the own one."""
    votes_for = np.count_nonzero(own - errors > LAG_VOTE)
    votes_against = np.count_nonzero(errors - own > LAG_VOTE)
    return bool(votes_for >= ROWS_MIN_VOTES and votes_against <= votes_for * LAG_ACCEPTED_SHARE)
