"""One run has one fault: a name that one segment has alone, where many share another, is not believed.

Segments are judged by themselves, and a short or certain one may fit a second cause by chance. Knows nothing
of how a name was found.
"""

from collections import Counter
from collections.abc import Mapping

from rlbatch.alignment.limits import COMPANY_MIN, COMPANY_SHARE
from rlbatch.catalogue import finding
from rlbatch.errors import Finding
from rlbatch.soundness.values import VALUE_FAULTS

CERTAIN = {
    "unexplained",
    "trainer-logprobs-differ",
    "trainer-not-finite",
    *(fault.code for fault in VALUE_FAULTS),
} - {"logprob-positive"}
"""Codes of values that cannot be, whatever the rest shows; but a flipped sign makes values positive."""


def without_odd_names(told: Mapping[int, Finding]) -> dict[int, Finding]:
    """The findings of one provenance, by segment, with names that are odd ones out told as `unexplained`.

    Example:
        shifted-from 27 times and mixed-versions once: 27 times shifted-from, and unexplained once
    """
    counts = Counter(found.code for found in told.values() if found.code not in CERTAIN)
    if not counts:
        return dict(told)
    usual, number = counts.most_common(1)[0]
    odd = {code for code, times in counts.items() if times <= COMPANY_SHARE * number}
    if number < COMPANY_MIN or not odd:
        return dict(told)
    return {at: _nameless(found, usual, number) if found.code in odd else found for at, found in told.items()}


def without_names_of_few(told: Mapping[int, Finding]) -> dict[int, Finding]:
    """The findings of all turns, where a name that fewer have than are unexplained for sure is not believed.

    Example:
        unexplained 38 times, rows-permuted twice: unexplained 40 times
    """
    counts = Counter(found.code for found in told.values() if found.code not in CERTAIN)
    unknown = sum(found.code == "unexplained" and found.severity == "error" for found in told.values())
    few = {code for code, times in counts.items() if times < unknown}
    if unknown < COMPANY_MIN or not few:
        return dict(told)
    return {
        at: _nameless(found, "unexplained", unknown) if found.code in few else found
        for at, found in told.items()
    }


def _nameless(found: Finding, usual: str, number: int) -> Finding:
    return finding(
        "unexplained",
        severity=found.severity,
        where=found.where,
        expected=found.expected,
        found=f"{found.found}; by itself that is {found.code}, but {number} other turns are {usual}",
    )
