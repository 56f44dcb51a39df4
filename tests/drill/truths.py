"""What a finding must say besides the right code: the size of the fault, or the row, found out from the rows.

The faults draw their sizes and tell nobody; here they are measured on the good rows and the spoilt ones.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from rlbatch.drill import Drilled
from rlbatch.errors import Finding
from rlbatch.faults import Scored
from rlbatch.records import Sample

WITHIN = 0.05
"""Relative error of a parameter that still counts as told."""
WRONG_ID_REACHES = 8
"""Tokens after a wrong id that it moves so far that they may be wrong or not."""
LOWER_THAN_ANY_MASS = -0.7
"""Logprob, nats, of a token that no kept set of half the mass or more lifts up to 0."""
LAG = re.compile(r" at lag ([+-]\d+)")
OWNER = re.compile(r"to those of sample (\d+),")
TEMPERATURE = re.compile(r"temperature ([\d.e+-]+), where ([\d.e+-]+) is stated")
DIVISOR = re.compile(r"divided by ([\d.e+-]+),")
BASE = re.compile(r"base ([\d.e+-]+) in place")
KEPT = re.compile(r"(top_p|top_k) ([\d.e+-]+) ")
TOKENS = re.compile(r"at tokens ([\d, ]+)")


def is_right(case: Drilled) -> bool | None:
    """Whether the findings of a named case say the right size; None where there is none to say."""
    check = CHECKS.get(case.code)
    if check is None or case.told != case.code:
        return None
    mine = [found for found in case.findings if found.code == case.code]
    return all(check(case, found) for found in mine)


def _rows(case: Drilled, found: Finding) -> tuple[Sample, Sample]:
    """The good and the spoilt row of a finding; of pooled findings the first."""
    at = found.where.sample or 0
    after: Any = case.after[at]
    return case.before[at], after.sample if isinstance(after, Scored) else after


def _lag(case: Drilled, found: Finding) -> bool:
    match = LAG.search(found.found)
    return match is not None and _has_lag(*_rows(case, found), int(match[1]))


def _has_lag(old: Sample, new: Sample, lag: int) -> bool:
    at = np.flatnonzero(np.isfinite(new.inference_logprobs))
    at = at[(at + lag >= 0) & (at + lag < len(old))]
    moved = old.inference_logprobs[at + lag]
    there = np.isfinite(moved)
    return bool(there.any() and np.array_equal(new.inference_logprobs[at][there], moved[there]))


def _owner(case: Drilled, found: Finding) -> bool:
    match = OWNER.search(found.found)
    if match is None:
        return False
    _, new = _rows(case, found)
    values = new.inference_logprobs[np.isfinite(new.inference_logprobs)]
    owner = case.before[int(match[1])].inference_logprobs
    theirs = owner[np.isfinite(owner)]
    # A row with several turns got one turn of its owner.
    windows = np.lib.stride_tricks.sliding_window_view(theirs, min(8, len(theirs)))
    return any(np.isin(window, values).all() for window in windows)


def _near(told: str, true: float) -> bool:
    return abs(float(told) - true) <= WITHIN * abs(true)


def _temperature(case: Drilled, found: Finding) -> bool:
    match = TEMPERATURE.search(found.found)
    old, new = _rows(case, found)
    return match is not None and all(
        _near(text, each.provenances[0].divisor)
        for text, each in zip(match.groups(), (old, new), strict=True)
    )


def _divisor(case: Drilled, found: Finding) -> bool:
    match = DIVISOR.search(found.found)
    _, new = _rows(case, found)
    return match is not None and _near(match[1], new.provenances[0].divisor)


def _base(case: Drilled, found: Finding) -> bool:
    match = BASE.search(found.found)
    old, new = _rows(case, found)
    at = int(np.nanargmin(old.inference_logprobs))
    true = float(np.exp(old.inference_logprobs[at] / new.inference_logprobs[at]))
    return match is not None and _near(match[1], true)


def _kept(case: Drilled, found: Finding) -> bool:
    match = KEPT.search(found.found)
    if match is None:
        return False
    # The kept set of each position, from how far its logprob was moved.
    sizes, low, high = [], 0.0, 1.0
    for old, new in zip(case.before, case.after, strict=True):
        if not isinstance(new, Scored) or new.sample is old:
            continue
        at = np.flatnonzero(new.sample.loss_mask)
        logits = new.logits[at - 1].astype(np.float64) / old.temperature[at, None]
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        mass = np.cumsum(np.sort(shares / shares.sum(-1, keepdims=True))[:, ::-1], axis=-1)
        moved = (new.sample.inference_logprobs - old.inference_logprobs)[at].astype(np.float64)
        last = np.abs(mass - np.exp(-moved)[:, None]).argmin(-1)
        places = np.arange(len(at))
        # Where nearly all mass is in one token, its rounding hides how many were kept.
        # And what would have passed 0 was moved by less.
        clear = (moved > 1e-4) & (old.inference_logprobs[at] < LOWER_THAN_ANY_MASS)
        sizes += (last[clear] + 1).tolist()
        high = min(high, *mass[places, last][clear].tolist())
        low = max(low, *(mass[places, last - 1] * (last > 0))[clear].tolist())
    by_size = float(np.std(sizes)) < 0.5
    if match[1] == "top_k":
        return by_size and _near(match[2], float(np.median(sizes)))
    return not by_size and low * (1 - WITHIN) <= float(match[2]) <= high * (1 + WITHIN)


def _slots(case: Drilled, found: Finding) -> bool:
    match = TOKENS.search(found.found)
    old, new = _rows(case, found)
    turn = new.turn == found.where.turn
    changed = np.flatnonzero((old.token_ids != new.token_ids) & turn)
    told = set() if match is None else {int(each) for each in match[1].split(",") if each.strip()}
    # After a wrong id the trainer reads on from it: what comes shortly after is not for it to tell.
    alone = changed[np.diff(changed, prepend=-WRONG_ID_REACHES - 1) > WRONG_ID_REACHES]
    return set(alone.tolist()) <= told <= set(changed.tolist())


CHECKS: dict[str, Callable[[Drilled, Finding], bool]] = {
    "shifted": _lag,
    "rows-permuted": _owner,
    "temperature-mismatch": _temperature,
    "divided-by-temperature": _divisor,
    "wrong-base": _base,
    "truncation-renormalized": _kept,
    "wrong-ids": _slots,
}
"""By code: what must be said of a fault that was named."""
