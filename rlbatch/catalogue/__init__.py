"""One entry a code: the symptom, how it is found, the likely cause, the fix. Codes are permanent.

`finding` makes every `Finding`: a check says where, what it expected and what it found; the catalogue knows
the rest. `rlbatch explain CODE` prints an entry. Knows nothing of how the checks compute.
"""

from rlbatch.catalogue import aligned, drift, layout, ranks, reply, scoring, sound, stops, storage
from rlbatch.catalogue.entry import Entry, Level
from rlbatch.errors import Finding, Severity, Where

__all__ = ["CATALOGUE", "Entry", "Level", "finding"]

_LEVELS = (reply, storage, sound, stops, layout, scoring, aligned, drift, ranks)

CATALOGUE: dict[str, Entry] = {entry.code: entry for level in _LEVELS for entry in level.ENTRIES}
"""Every code."""


def finding(
    code: str,
    *,
    expected: str,
    found: str,
    where: Where | None = None,
    likely: str | None = None,
    fix: str | None = None,
    severity: Severity | None = None,
) -> Finding:
    """A finding of a catalogued code; cause and fix are the catalogue's unless the check knows better.

    Raises:
        KeyError: the code is not in the catalogue.
    """
    entry = CATALOGUE[code]
    return Finding(
        code=code,
        severity=severity or entry.severity,
        where=where or Where(),
        expected=expected,
        found=found,
        likely=likely or entry.likely,
        fix=fix or entry.fix,
    )
