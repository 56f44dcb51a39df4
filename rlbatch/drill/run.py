"""The drill itself: every fault, case by case, and the clean rows."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from rlbatch.drill.cases import DrillOptions, one_case, the_faults
from rlbatch.drill.judging import findings_of
from rlbatch.drill.pool import Pool
from rlbatch.drill.scores import Scores
from rlbatch.drill.tally import Tally
from rlbatch.records import Sample

CLEAN_ROWS_A_STEP = 64

OnProgress: TypeAlias = Callable[[float], None]


def run_drill(
    pool: Pool, scores: Scores, options: DrillOptions, *, on_progress: OnProgress | None = None
) -> Tally:
    """Plant every fault, and judge the clean rows.

    Args:
        pool: good rollouts; copies are spoilt.
        scores: the trainer's model.
        options: how much.
        on_progress: told the share of cases that is done.

    Raises:
        ScoringError: the model cannot score.
    """
    tally = Tally(num_rows=len(pool.samples), num_able=len(pool.able))
    faults = the_faults()
    for done, fault in enumerate(faults):
        cases = [one_case(fault, case, pool, scores, options) for case in range(options.cases)]
        for drilled in cases:
            if drilled is not None:
                tally.add(drilled)
        if all(drilled is None for drilled in cases):
            tally.no_place.append(fault.code)
        if on_progress is not None:
            on_progress((done + 1) / (len(faults) + 1))
    count_clean(tally, pool.samples, scores)
    return tally


def count_clean(tally: Tally, samples: Sequence[Sample], scores: Scores) -> None:
    """Judge rows in which nothing was planted."""
    by_mode = sorted(samples, key=lambda sample: sorted(sample.logprobs_modes))
    for start in range(0, len(by_mode), CLEAN_ROWS_A_STEP):
        part = by_mode[start : start + CLEAN_ROWS_A_STEP]
        found = findings_of(part, scores, layout="packed")
        tally.num_clean += len(part)
        tally.false_alarms += sum(each.severity == "error" for each in found)
        tally.false_warnings += sum(each.severity == "warning" for each in found)
