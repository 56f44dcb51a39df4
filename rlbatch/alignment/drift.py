"""Aggregates over segments without an accepted cause: how far apart engine and trainer are, and by age.

Knows nothing of single tokens. Sums merge across batches and ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.limits import CLEAN_MEAN, OUTSIDE_SHARE, STALE_ERRORS, STALE_LEAST, Limits
from rlbatch.alignment.measure import COLUMN
from rlbatch.catalogue import finding
from rlbatch.errors import Finding
from rlbatch.records import UNKNOWN_VERSION
from rlbatch_kernels import STAT_COLUMNS

UNKNOWN_AGE = -1
"""Key of tokens drawn by unknown weights."""


@dataclass(slots=True, kw_only=True)
class Sums:
    """Sums over compared tokens."""

    num_tokens: float = 0.0
    sum_log_ratio: float = 0.0
    sum_abs_log_ratio: float = 0.0
    sum_k3: float = 0.0
    sum_k3_capped: float = 0.0
    sum_segment_k3_squared: float = 0.0
    """Over segments: their capped k3, squared. This and the next two say how sure the mean is."""
    sum_segment_k3_count: float = 0.0
    """Over segments: their capped k3 times their tokens."""
    sum_segment_count_squared: float = 0.0
    """Over segments: their tokens, squared."""
    sum_ratio: float = 0.0
    num_drawn: float = 0.0
    """Tokens said to be drawn from a whole softmax of which the engine gives the values."""
    sum_drawn_below: float = 0.0
    """Of these: 1 - ratio."""
    sum_drawn_squared: float = 0.0
    """Of these: (1 - ratio)^2."""
    max_abs_log_ratio: float = 0.0
    num_confident_disagreements: float = 0.0
    num_outside_kept_set: float = 0.0
    """Beside `num_tokens`: they were sampled, and the trainer's kept set does not hold them."""
    all_clean: bool = True
    """Mean |log_ratio| of each segment is under `CLEAN_MEAN`."""

    def add(self, other: "Sums") -> None:
        """Take in other tokens."""
        self.num_tokens += other.num_tokens
        self.sum_log_ratio += other.sum_log_ratio
        self.sum_abs_log_ratio += other.sum_abs_log_ratio
        self.sum_k3 += other.sum_k3
        self.sum_k3_capped += other.sum_k3_capped
        self.sum_segment_k3_squared += other.sum_segment_k3_squared
        self.sum_segment_k3_count += other.sum_segment_k3_count
        self.sum_segment_count_squared += other.sum_segment_count_squared
        self.sum_ratio += other.sum_ratio
        self.num_drawn += other.num_drawn
        self.sum_drawn_below += other.sum_drawn_below
        self.sum_drawn_squared += other.sum_drawn_squared
        self.max_abs_log_ratio = max(self.max_abs_log_ratio, other.max_abs_log_ratio)
        self.num_confident_disagreements += other.num_confident_disagreements
        self.num_outside_kept_set += other.num_outside_kept_set
        self.all_clean &= other.all_clean

    @property
    def mostly_inside(self) -> bool:
        """So few tokens are outside the trainer's kept sets that rounding explains it."""
        return self.num_outside_kept_set <= OUTSIDE_SHARE * (self.num_tokens + self.num_outside_kept_set)

    def mean(self, total: float) -> float:
        """0 where there are no tokens."""
        return total / self.num_tokens if self.num_tokens else 0.0

    def kld_variance(self) -> float:
        """Of the mean capped k3, nats squared: tokens of one segment are not independent, segments are.

        Example:
            segments of 10 tokens with sums 1 and 3: mean 0.2, variance (1 + 1) / 20^2 = 0.005
        """
        mean = self.mean(self.sum_k3_capped)
        spread = (
            self.sum_segment_k3_squared
            - 2 * mean * self.sum_segment_k3_count
            + mean**2 * self.sum_segment_count_squared
        )
        return max(self.mean(self.mean(spread)), 0.0)


@dataclass(slots=True, kw_only=True)
class Drift:
    """Sums by age in versions."""

    by_age: dict[int, Sums] = field(default_factory=dict)
    """Age 0 is current; -1 unknown."""

    def add_rows(self, rows: NDArray[np.float64], ages: NDArray[np.int64], *, drawn: bool = False) -> None:
        """Take in segments: [G, stats] with the age of each.

        Args:
            rows: of one provenance.
            ages: [G] versions.
            drawn: their values are said to be those of the whole softmax that they were drawn from.
        """
        is_heard = rows[:, COLUMN["num_compared"]] > 0
        for age in sorted(set(ages[is_heard].tolist())):
            sums = _sums(chosen_rows(rows, is_heard & (ages == age)), drawn=drawn)
            self.by_age.setdefault(age, Sums()).add(sums)

    def add_outside(self, age: int, num_tokens: int) -> None:
        """Count tokens outside the trainer's own kept sets."""
        self.by_age.setdefault(age, Sums()).num_outside_kept_set += num_tokens

    def merge(self, other: "Drift") -> None:
        """Take in what another batch or rank found."""
        for age, sums in other.by_age.items():
            self.by_age.setdefault(age, Sums()).add(sums)

    def total(self) -> Sums:
        """All ages together."""
        total = Sums()
        for sums in self.by_age.values():
            total.add(sums)
        return total

    def judged(self, limits: Limits) -> bool:
        """Whether each age has enough to go by: tokens for the limits, or segments that are all clean."""
        return bool(self.by_age) and all(
            (sums.num_tokens >= limits.min_tokens or sums.all_clean) and sums.mostly_inside
            for sums in self.by_age.values()
        )


def age_of(version: int, trainer_version: int | None) -> int:
    """Versions between the weights that drew a token and the trainer's.

    Without a trainer version all are current. A version ahead of the trainer's is as unknown as none.
    """
    if trainer_version is None:
        return 0
    if version == UNKNOWN_VERSION or version > trainer_version:
        return UNKNOWN_AGE
    return trainer_version - version


def drift_findings(by_age: Mapping[int, Sums], limits: Limits) -> Iterator[Finding]:
    """`kld-high` for each age with enough tokens, an error for current ones; `version-unknown`, `stale`."""
    for age, sums in sorted(by_age.items()):
        kld = sums.mean(sums.sum_k3_capped)
        if sums.num_tokens < limits.min_tokens or kld <= limits.kld_warning:
            continue
        is_error = age == 0 and kld > limits.kld_error
        limit = limits.kld_error if is_error else limits.kld_warning
        yield finding(
            "kld-high",
            severity="error" if is_error else "warning",
            expected=f"capped inference KLD of at most {limit:g} nats",
            found=f"{kld:.4g} over {int(sums.num_tokens)} tokens of {age_text(age)}; "
            f"uncapped {sums.mean(sums.sum_k3):.4g}, "
            f"mean |log_ratio| {sums.mean(sums.sum_abs_log_ratio):.4g}",
        )
    if set(by_age) == {UNKNOWN_AGE}:
        yield finding(
            "version-unknown",
            expected="versions to hold against the trainer's",
            found=f"none in any turn, {int(by_age[UNKNOWN_AGE].num_tokens)} tokens",
        )
    stale = stale_finding(by_age, limits)
    if stale is not None:
        yield stale


def too_few(by_age: Mapping[int, Sums], limits: Limits) -> Iterator[Finding]:
    """`too-few-to-judge`, of the age with the fewest tokens: it alone is enough to leave all open."""
    open_ages = {
        age: sums
        for age, sums in by_age.items()
        if sums.num_tokens < limits.min_tokens and not sums.all_clean
    }
    if not open_ages:
        return
    age, sums = min(open_ages.items(), key=lambda item: item[1].num_tokens)
    yield finding(
        "too-few-to-judge",
        expected=f"of each version at least {limits.min_tokens} compared tokens, or a mean |log_ratio| under "
        f"{CLEAN_MEAN} nats in every turn",
        found=f"{int(sums.num_tokens)} tokens of {age_text(age)}, "
        f"inference KLD {sums.mean(sums.sum_k3):.3g}, |log_ratio| up to {sums.max_abs_log_ratio:.3g} nats",
    )


def stale_finding(by_age: Mapping[int, Sums], limits: Limits) -> Finding | None:
    """`stale`, where the capped KLD rises with the age of the data while current tokens are clean."""
    old = {age: sums for age, sums in by_age.items() if age > 0 and sums.num_tokens}
    current = by_age.get(0, Sums())
    kld = current.mean(current.sum_k3_capped)
    num_old = sum(sums.num_tokens for sums in old.values())
    if min(current.num_tokens, num_old) < limits.min_tokens or kld > limits.kld_warning:
        return None
    slope, error = _rise({0: current} | old)
    if slope < STALE_ERRORS * error or slope * max(old) < STALE_LEAST:
        return None
    means = ", ".join(
        f"{sums.mean(sums.sum_k3_capped):.3g} at lag {age}" for age, sums in sorted(old.items())
    )
    return finding(
        "stale",
        severity="warning",
        expected="a capped inference KLD that does not depend on the version lag",
        found=f"it rises by {slope:.3g} nats a version: {kld:.3g} over {int(current.num_tokens)} current "
        f"tokens, {means}; over {int(num_old)} older tokens",
    )


def _rise(by_age: Mapping[int, Sums]) -> tuple[float, float]:
    """Nats a version by least squares, each age weighted by how sure its mean is; and its standard error."""
    ages = np.array(list(by_age), float)
    klds = np.array([sums.mean(sums.sum_k3_capped) for sums in by_age.values()])
    variances = np.array([sums.kld_variance() for sums in by_age.values()])
    # Where an age shows no spread, its mean still has the rounding of its sums.
    weights = 1 / (variances + np.finfo(np.float32).eps ** 2)
    apart = ages - np.average(ages, weights=weights)
    information = float((weights * apart**2).sum())
    return float((weights * apart * klds).sum()) / information, information**-0.5


def metrics(drift: Drift, num_excluded_segments: int) -> dict[str, float]:
    """What a trainer logs: `rlbatch/<quantity>/<reduction>`, ratios before any clipping."""
    total = drift.total()
    named = {
        "rlbatch/num_tokens/sum": total.num_tokens,
        "rlbatch/num_excluded_segments/sum": float(num_excluded_segments),
        "rlbatch/num_outside_kept_set/sum": total.num_outside_kept_set,
        "rlbatch/k1/mean": -total.mean(total.sum_log_ratio),
        "rlbatch/abs_log_ratio/mean": total.mean(total.sum_abs_log_ratio),
        "rlbatch/abs_log_ratio/max": total.max_abs_log_ratio,
        "rlbatch/ratio/mean": total.mean(total.sum_ratio),
        "rlbatch/inference_kld/mean": total.mean(total.sum_k3),
        "rlbatch/inference_kld_capped/mean": total.mean(total.sum_k3_capped),
    }
    for age, sums in sorted(drift.by_age.items()):
        name = "unknown_version" if age == UNKNOWN_AGE else f"version_lag_{age}"
        named[f"rlbatch/inference_kld_capped/{name}"] = sums.mean(sums.sum_k3_capped)
        named[f"rlbatch/num_tokens/{name}"] = sums.num_tokens
        if age == 0:
            named["rlbatch/num_confident_disagreements/sum"] = sums.num_confident_disagreements
    return named


def chosen_rows(table: NDArray[np.float64], chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The rows of a table that are chosen; the table itself, and no copy, where all are."""
    return table if chosen.all() else table[chosen]


def _sums(rows: NDArray[np.float64], *, drawn: bool) -> Sums:
    # Of all columns at once: a sum for each of them takes longer than the table of a small batch.
    total = dict(zip(STAT_COLUMNS, rows.sum(axis=0).tolist(), strict=True))
    num, ratio = total["num_compared"], total["sum_ratio"]
    k3, count = rows[:, COLUMN["sum_k3_capped"]], rows[:, COLUMN["num_compared"]]
    return Sums(
        num_tokens=num,
        sum_log_ratio=total["sum_log_ratio"],
        sum_abs_log_ratio=total["sum_abs_log_ratio"],
        sum_k3=total["sum_k3"],
        sum_k3_capped=total["sum_k3_capped"],
        sum_segment_k3_squared=float(k3 @ k3),
        sum_segment_k3_count=float(k3 @ count),
        sum_segment_count_squared=float(count @ count),
        sum_ratio=ratio,
        num_drawn=num if drawn else 0.0,
        sum_drawn_below=num - ratio if drawn else 0.0,
        sum_drawn_squared=total["sum_sq_ratio"] - 2 * ratio + num if drawn else 0.0,
        max_abs_log_ratio=float(rows[:, COLUMN["max_abs_log_ratio"]].max()),
        num_confident_disagreements=total["num_confident_disagreements"],
        all_clean=bool(
            (rows[:, COLUMN["sum_abs_log_ratio"]] <= CLEAN_MEAN * rows[:, COLUMN["num_compared"]]).all()
        ),
    )


def age_text(age: int) -> str:
    """An age in words."""
    if age == UNKNOWN_AGE:
        return "unknown version"
    return "the trainer's own version" if age == 0 else f"version lag {age}"
