"""One case: a fault in some good rows, and the word for what was said of it."""

import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from rlbatch.batch import LAYOUTS, Layout
from rlbatch.catalogue import CATALOGUE
from rlbatch.drill.judging import SetUp, findings_of
from rlbatch.drill.layouts import layout_case
from rlbatch.drill.pool import Pool
from rlbatch.drill.scores import Scores
from rlbatch.drill.shows import require_fades, require_shows
from rlbatch.drill.tally import Drilled, told
from rlbatch.faults import (
    FAULTS,
    LAYOUT_FAULTS,
    MODEL_FAULTS,
    SET_FAULTS,
    TRAINER_VERSION,
    Fault,
    LayoutFault,
    ModelFault,
    NoPlaceError,
    Scored,
    SetFault,
)
from rlbatch.records import Sample

AnyFault: TypeAlias = Fault | ModelFault | SetFault | LayoutFault

ROWS_A_CASE = 8
"""Rows of a batch one of which is spoilt: the others show what is normal."""
DRIFT_TOKENS = 1500
"""Sampled tokens of a case of an aggregate, which says nothing of a thousand or fewer."""
ATTEMPTS = 16
"""Draws of rows and places before the rollouts are said to offer no place for a fault."""
GROUP_SIZE = 2
RUN = SetUp(trainer_version=TRAINER_VERSION, max_version_lag=4, group_size=GROUP_SIZE)
"""What is said of the run where a fault is one against the run."""

ALWAYS_ALL = frozenset(
    (
        *("temperature-mismatch", "divided-by-temperature", "truncation-renormalized", "penalties-applied"),
        *(
            "prefix-differs",
            "dropout-on",
            "trainer-logprobs-differ",
            "boundary-leak",
            "kld-high",
            "nothing-trained",
            "stale",
        ),
        # New weights meet all replies that are under way.
        "mixed-versions",
    )
)
"""Codes of faults that lie in how a whole run is set up, or show in many tokens only: all rows are spoilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """How much is drilled."""

    cases: int
    """Of each fault, half of them in one row of several where the fault can be in one row only."""
    pooled_tokens: int = 1024
    """Sampled tokens of a case whose rows are all spoilt, where the rollouts have as many."""
    seed: int = 0


def the_faults() -> tuple[AnyFault, ...]:
    """Every fault that a drill plants."""
    return (*FAULTS.values(), *MODEL_FAULTS.values(), *SET_FAULTS.values(), *LAYOUT_FAULTS.values())


def one_case(fault: AnyFault, case: int, pool: Pool, scores: Scores, options: DrillOptions) -> Drilled | None:
    """Plant one fault and judge; None where the rollouts offer no place for it.

    Args:
        fault: what to plant.
        case: which of its cases: even ones spoil all rows, odd ones a single row where that can be.
        pool: the rows.
        scores: the trainer's model.
        options: how many tokens, and the seed.

    Raises:
        RecordError: the spoilt rows cannot be collated; ScoringError: or not scored.
    """
    rng = np.random.default_rng([options.seed, case, zlib.crc32(fault.code.encode())])
    for _ in range(ATTEMPTS):
        # Rows that cannot carry the fault, as short ones a shift, are drawn again.
        with suppress(NoPlaceError):
            if isinstance(fault, LayoutFault):
                return layout_case(fault, _few(pool.any_length, rng), rng, share=_share(case))
            if isinstance(fault, SetFault) or (isinstance(fault, Fault) and fault.code in SET_FAULTS):
                return _set_case(fault, case, pool, scores, rng)
            return _row_case(fault, case, pool, scores, rng, options)
    return None


def _row_case(
    fault: Fault | ModelFault,
    case: int,
    pool: Pool,
    scores: Scores,
    rng: np.random.Generator,
    options: DrillOptions,
) -> Drilled:
    in_all = fault.code in ALWAYS_ALL or fault.together or case % 2 == 0
    # Where rows trade places, they are those of one batch.
    as_one_batch = fault.together or not in_all
    num_tokens = options.pooled_tokens
    if CATALOGUE[fault.code].level == "drift":
        num_tokens = max(num_tokens, DRIFT_TOKENS)
    if CATALOGUE[fault.code].level == "sound":
        # It shows without a trainer, in rows of any length.
        rows = _few(pool.any_length, rng)
    else:
        rows = _few(pool.able, rng) if as_one_batch else _some(pool.alike, rng, num_tokens)
    share = 1.0 if in_all else _share(case)
    planted: Sequence[Sample | Scored]
    if isinstance(fault, ModelFault):
        planted = fault.plant(rows, rng, score=scores, share=share)
    else:
        planted = fault.plant(rows, rng, share=share)
    if fault.code in ALWAYS_ALL and not fault.together:
        # A run that has the fault has it in every row: one that offers no place could not have come about.
        kept = [at for at in range(len(rows)) if is_spoilt(planted[at], rows[at], scores)]
        rows, planted = [rows[at] for at in kept], [planted[at] for at in kept]
    packed_only = isinstance(fault, ModelFault) and fault.packed_only
    layout: Layout = "packed" if packed_only else LAYOUTS[case // 2 % len(LAYOUTS)]
    truncated = isinstance(fault, ModelFault) and fault.truncated
    set_up = SetUp(purpose="train-truncated" if truncated else "train")
    if CATALOGUE[fault.code].level == "aligned":
        in_pool = fault.code in ALWAYS_ALL
        good, spoilt_rows = _scored(rows, scores), _scored(planted, scores)
        require_shows(good, spoilt_rows, in_pool=in_pool)
        if fault.code == "prefix-differs":
            require_fades(good, spoilt_rows)
    found = findings_of(planted, scores, layout=layout, set_up=set_up)
    spoilt = {at for at in range(len(rows)) if is_spoilt(planted[at], rows[at], scores)}
    said = told(fault.code, found, spoilt)
    return Drilled(code=fault.code, told=said, before=rows, after=planted, findings=found)


def _set_case(
    fault: SetFault | Fault, case: int, pool: Pool, scores: Scores, rng: np.random.Generator
) -> Drilled:
    """A fault of the list: every row counts as spoilt."""
    is_drift = CATALOGUE[fault.code].level == "drift"
    # Current and older tokens are each so many.
    drawn = _some(pool.alike, rng, 3 * DRIFT_TOKENS) if is_drift else _few(pool.able or pool.any_length, rng)
    rows = in_run(drawn)
    planted = fault.plant(rows, rng, share=1.0 if fault.code in ALWAYS_ALL else _share(case))
    found = findings_of(planted, scores, layout="packed", set_up=RUN)
    said = told(fault.code, found, set(range(len(planted))))
    return Drilled(code=fault.code, told=said, before=rows, after=planted, findings=found)


def in_run(rows: Sequence[Sample]) -> list[Sample]:
    """Rows as a run of `RUN` has them: whole groups, drawn by the version before the trainer's."""
    return [
        replace(
            row,
            group_id=f"group{at // GROUP_SIZE}",
            policy_version=np.where(row.turn >= 0, np.int32(TRAINER_VERSION - 1), np.int32(-1)),
        )
        for at, row in enumerate(rows[: len(rows) // GROUP_SIZE * GROUP_SIZE])
    ]


def is_spoilt(new: Sample | Scored, old: Sample, scores: Scores) -> bool:
    """Whether a fault was planted in a row."""
    if isinstance(new, Sample):
        return new is not old
    same = np.array_equal(new.trainer_logprobs, scores(old).trainer_logprobs, equal_nan=True)
    return new.sample is not old or not same


def _scored(rows: Sequence[Sample | Scored], scores: Scores) -> list[Scored]:
    return [scores(row) if isinstance(row, Sample) else row for row in rows]


def _share(case: int) -> float:
    return 1.0 if case % 2 == 0 else 1 / ROWS_A_CASE


def _few(samples: Sequence[Sample], rng: np.random.Generator) -> list[Sample]:
    _require_some(samples)
    chosen = rng.choice(len(samples), min(ROWS_A_CASE, len(samples)), replace=False)
    return [samples[index] for index in chosen]


def _some(samples: Sequence[Sample], rng: np.random.Generator, num_tokens: int) -> list[Sample]:
    """Rows with that many sampled tokens together; at least two, and all where they have fewer."""
    _require_some(samples)
    chosen: list[Sample] = []
    total = 0
    for index in rng.permutation(len(samples)):
        chosen.append(samples[index])
        total += int(np.count_nonzero(samples[index].turn >= 0))
        if total >= num_tokens and len(chosen) >= 2:
            break
    return chosen


def _require_some(samples: Sequence[Sample]) -> None:
    if not samples:
        raise NoPlaceError("drill: expected rows in which a fault shows, found none")
