"""What a drill found: for each fault planted, what was said of it. Knows nothing of how."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlbatch.errors import Finding
from rlbatch.faults import Scored
from rlbatch.records import Sample

NAMELESS = ("unexplained", "kld-high", "ratio-mean-off", "ratio-tail")
"""Codes that say something is wrong and not what: no name, right or wrong."""
UNEXPLAINED = "unexplained"
MISSED = "(nothing)"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drilled:
    """One case: a fault planted, and what was said."""

    code: str
    told: str
    """The fault's own code; another one, `unexplained`, or `(nothing)`."""
    before: Sequence[Sample] = ()
    """The good rows."""
    after: Sequence[Sample | Scored] = ()
    """The same with the fault in some of them; empty where it was planted in a batch's arrays."""
    findings: Sequence[Finding] = ()
    """Everything that was said."""


def told(code: str, findings: Sequence[Finding], spoilt: set[int]) -> str:
    """The word for what was said of the spoilt rows, or of all rows together.

    Another cause counts before the right one: a person who reads both is led astray.
    """
    codes = [found.code for found in findings if found.where.sample is None or found.where.sample in spoilt]
    other = next((each for each in codes if each != code and each not in NAMELESS), None)
    if other is not None:
        return other
    if code in codes:
        return code
    return UNEXPLAINED if codes else MISSED


@dataclass(slots=True, kw_only=True)
class Tally:
    """Cases counted."""

    matrix: dict[str, Counter[str]] = field(default_factory=dict)
    """By the code planted: how often each code was told of it."""
    num_clean: int = 0
    """Rows without a fault that were judged."""
    false_alarms: int = 0
    """Findings of severity error on them."""
    false_warnings: int = 0
    """Findings of warning level on them."""
    no_place: list[str] = field(default_factory=list)
    """Codes of faults that these rollouts offer no place for."""
    num_rows: int = 0
    """Rollouts that could be trained on."""
    num_able: int = 0
    """Those of them in which a fault shows that takes the trainer's logprobs; 0 where fewer than two have
    enough to go by."""

    def add(self, case: Drilled) -> None:
        """Count one case."""
        self.matrix.setdefault(case.code, Counter())[case.told] += 1

    @property
    def planted(self) -> int:
        """All cases."""
        return sum(told.total() for told in self.matrix.values())

    @property
    def named(self) -> int:
        """Cases in which the fault's own code was told, and no other cause."""
        return sum(told[code] for code, told in self.matrix.items())

    @property
    def unexplained(self) -> int:
        """Cases in which something was said to be wrong, and not what."""
        return sum(told[UNEXPLAINED] for code, told in self.matrix.items() if code != UNEXPLAINED)

    @property
    def missed(self) -> int:
        """Cases of which nothing was said."""
        return sum(told[MISSED] for told in self.matrix.values())

    @property
    def wrong(self) -> int:
        """Cases in which another cause was named."""
        return self.planted - self.named - self.unexplained - self.missed

    @property
    def passed(self) -> bool:
        """Something was planted, nothing missed or misnamed, and nothing said of clean rows."""
        return self.planted > 0 and not (self.wrong or self.missed or self.false_alarms)

    def as_json(self) -> dict[str, Any]:
        """The document of `rlbatch drill --format json`; a fault that found no place has an empty row."""
        return {
            "planted": self.planted,
            "named": self.named,
            "wrong": self.wrong,
            "unexplained": self.unexplained,
            "missed": self.missed,
            "false_alarms": self.false_alarms,
            "matrix": {code: dict(told) for code, told in self.matrix.items()}
            | {code: {} for code in self.no_place},
        }
