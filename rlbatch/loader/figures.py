"""What a trainer can log of its loader: sums over the batches that were handed over."""

from collections import Counter, deque
from dataclasses import dataclass

from rlbatch.errors import Finding

MAX_WARNINGS = 1000
"""So many warnings are kept, the newest; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of checks. All ranks find the same."""

    num_quarantined: int = 0
    findings: tuple[Finding, ...] = ()
    """Warnings, and the faults of what was set aside."""

    def plus(self, other: "Found") -> "Found":
        """Both."""
        return Found(
            num_quarantined=self.num_quarantined + other.num_quarantined,
            findings=(*self.findings, *other.findings),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of one batch, and what was found since the batch before."""

    num_samples: int = 0
    num_tokens: int = 0
    """Without padding."""
    num_loss_tokens: int = 0
    num_fillers: int = 0
    found: Found = Found()


_SUMMED = ("num_samples", "num_tokens", "num_loss_tokens", "num_fillers")


class Figures:
    """Sums of counts; those of one rank, where samples and tokens are meant.

    Args:
        max_tokens: budget of a batch, for the fill.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._sums: Counter[str] = Counter()
        self._codes: Counter[str] = Counter()
        self._wait_s = 0.0
        self._warnings: deque[Finding] = deque(maxlen=MAX_WARNINGS)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The newest, oldest first."""
        return tuple(self._warnings)

    def add(self, counts: Counts) -> None:
        """Count a batch that was handed over."""
        self._sums["num_batches"] += 1
        for name in _SUMMED:
            self._sums[name] += getattr(counts, name)
        self.add_found(counts.found)

    def add_found(self, found: Found) -> None:
        """Count what came of checks."""
        self._sums["num_quarantined"] += found.num_quarantined
        self._codes.update(each.code for each in found.findings)
        self._warnings.extend(each for each in found.findings if each.severity == "warning")

    def waited(self, seconds: float) -> None:
        """Count time that the consumer spent waiting."""
        self._wait_s += seconds

    def metrics(self) -> dict[str, float]:
        """All figures, as `rlbatch/loader_<quantity>/<reduction>`.

        Example:
            {"rlbatch/loader_fill/mean": 0.97, "rlbatch/loader_findings/version-mixed": 2.0, ...}
        """
        names = ("num_batches", *_SUMMED, "num_quarantined")
        named = {f"rlbatch/loader_{name}/sum": float(self._sums[name]) for name in names}
        room = self._sums["num_batches"] * self._max_tokens
        named["rlbatch/loader_fill/mean"] = self._sums["num_tokens"] / room if room else 0.0
        named["rlbatch/loader_wait_seconds/sum"] = self._wait_s
        return named | {
            f"rlbatch/loader_findings/{code}": float(n) for code, n in sorted(self._codes.items())
        }
