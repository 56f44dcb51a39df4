"""The drill itself: which fault goes into which rows, and what is counted of what was said."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rlbatch.batch import LAYOUTS, Layout
from rlbatch.catalogue import CATALOGUE
from rlbatch.drill.judging import findings_of
from rlbatch.drill.pool import Pool
from rlbatch.drill.scores import Scores
from rlbatch.drill.tally import DOUBTS, MISSED, UNEXPLAINED, Drilled, Tally
from rlbatch.errors import Finding, RecordError
from rlbatch.faults import FAULTS, MODEL_FAULTS, Fault, ModelFault, Scored
from rlbatch.records import Sample

ROWS_A_CASE = 8
"""Rows of a batch one of which is spoilt: the others show what is normal."""
CLEAN_ROWS_A_STEP = 64
DRIFT_TOKENS = 1500
"""Sampled tokens of a case of an aggregate, which says nothing of a thousand or fewer."""

ALWAYS_ALL = frozenset(
    (
        *("temperature-mismatch", "divided-by-temperature", "truncation-renormalized", "penalties-applied"),
        *("prefix-differs", "dropout-on", "boundary-leak", "kld-high", "nothing-trained", "stale"),
    )
)
"""Codes of faults that lie in how a whole run is set up, or show in many tokens only: all rows are spoilt."""

OnProgress: TypeAlias = Callable[[float], None]
AnyFault: TypeAlias = Fault | ModelFault


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """How much is drilled."""

    cases: int
    """Of each fault, half of them in one row of several where the fault can be in one row only."""
    pooled_tokens: int = 1024
    """Sampled tokens of a case whose rows are all spoilt, where the rollouts have as many."""
    seed: int = 0


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
    tally = Tally()
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


def the_faults() -> tuple[AnyFault, ...]:
    """Every fault that a drill plants."""
    return (*FAULTS.values(), *MODEL_FAULTS.values())


def one_case(fault: AnyFault, case: int, pool: Pool, scores: Scores, options: DrillOptions) -> Drilled | None:
    """One fault in some rows, and what is said of them; None where the rows offer no place for it."""
    rng = np.random.default_rng([options.seed, case, zlib.crc32(fault.code.encode())])
    in_all = fault.code in ALWAYS_ALL or fault.together or case % 2 == 0
    num_tokens = options.pooled_tokens
    if CATALOGUE[fault.code].level == "drift":
        num_tokens = max(num_tokens, DRIFT_TOKENS)
    rows = _some(pool.alike, rng, num_tokens) if in_all else _few(pool.able, rng)
    try:
        planted = plant(fault, rows, rng, scores, share=1.0 if in_all else 1 / ROWS_A_CASE)
    except RecordError:
        return None
    packed_only = isinstance(fault, ModelFault) and fault.packed_only
    layout: Layout = "packed" if packed_only else LAYOUTS[case // 2 % len(LAYOUTS)]
    found = findings_of(planted, scores, layout=layout)
    spoilt = {
        at for at, (new, old) in enumerate(zip(planted, rows, strict=True)) if is_spoilt(new, old, scores)
    }
    return Drilled(code=fault.code, told=told(fault.code, found, spoilt))


def plant(
    fault: AnyFault, rows: Sequence[Sample], rng: np.random.Generator, scores: Scores, *, share: float
) -> Sequence[Sample | Scored]:
    """The rows with the fault in a share of them.

    Raises:
        RecordError: no row offers a place for it.
    """
    if isinstance(fault, ModelFault):
        return fault.plant(rows, rng, score=scores, share=share)
    return fault.plant(rows, rng, share=share)


def is_spoilt(new: Sample | Scored, old: Sample, scores: Scores) -> bool:
    """Whether a fault was planted in a row."""
    if isinstance(new, Sample):
        return new is not old
    same = np.array_equal(new.trainer_logprobs, scores(old).trainer_logprobs, equal_nan=True)
    return new.sample is not old or not same


def told(code: str, findings: Sequence[Finding], spoilt: set[int]) -> str:
    """The word for what was said of the spoilt rows, or of all rows together.

    Another cause counts before the right one: a person who reads both is led astray.
    """
    codes = [found.code for found in findings if found.where.sample is None or found.where.sample in spoilt]
    other = next((each for each in codes if each != code and each not in DOUBTS), None)
    if other is not None:
        return other
    if code in codes:
        return code
    return UNEXPLAINED if codes else MISSED


def count_clean(tally: Tally, samples: Sequence[Sample], scores: Scores) -> None:
    """Judge rows in which nothing was planted."""
    by_mode = sorted(samples, key=lambda sample: sorted(sample.logprobs_modes))
    for start in range(0, len(by_mode), CLEAN_ROWS_A_STEP):
        part = by_mode[start : start + CLEAN_ROWS_A_STEP]
        found = findings_of(part, scores, layout="packed")
        tally.num_clean += len(part)
        tally.false_alarms += sum(each.severity == "error" for each in found)
        tally.false_warnings += sum(each.severity == "warning" for each in found)


def _few(samples: Sequence[Sample], rng: np.random.Generator) -> list[Sample]:
    chosen = rng.choice(len(samples), min(ROWS_A_CASE, len(samples)), replace=False)
    return [samples[index] for index in chosen]


def _some(samples: Sequence[Sample], rng: np.random.Generator, num_tokens: int) -> list[Sample]:
    """Rows with that many sampled tokens together; at least two, and all where they have fewer."""
    chosen: list[Sample] = []
    total = 0
    for index in rng.permutation(len(samples)):
        chosen.append(samples[index])
        total += int(np.count_nonzero(samples[index].turn >= 0))
        if total >= num_tokens and len(chosen) >= 2:
            break
    return chosen
