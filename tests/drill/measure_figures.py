"""Figures of the fire drill on real rollouts: what is named at which noise, how often clean rows alarm.

    python tests/drill/measure_figures.py ROLLOUTS --model examples/tinylm --level LEVEL --parts DIR
    python tests/drill/render_figures.py --parts DIR --out tests/drill/figures.md

ROLLOUTS is what `tests/vllm/sample_rollouts.py` wrote: a directory each for `float32_processed`,
`bfloat16_processed`, ... One level a process; the other script puts the parts together.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bootstrap import Step, bootstrapped
from other_weights import judged_with_other_weights
from truths import is_right

from rlbatch.alignment import Judge, measure
from rlbatch.catalogue import CATALOGUE
from rlbatch.drill import (
    DrillOptions,
    Noise,
    Pool,
    Scores,
    Tally,
    findings_of,
    load_pool,
    one_case,
    the_faults,
)
from rlbatch.faults import Scored
from rlbatch.records import Sample
from rlbatch.scoring import load_model, model_vocab_size
from rlbatch.storage.statements import Statement

POOL_SAMPLES = 1536
"""Rows that faults are planted into; their logits fit into memory together."""
STEP_ROWS = 128
"""Clean rows that are judged together, as one step of a trainer."""
TOLD_ROWS = 100 * STEP_ROWS
LOGITS_ROWS = 1200
"""Clean rows that are judged with their logits too: some causes are asked about only then."""
OTHER_WEIGHTS_LEVEL = "fp32"
"""Other weights are noise themselves: they are judged where there is no other."""
SOUND_LEVEL = "fp32"
"""Faults that samples alone show know nothing of noise: they are planted at this level only."""


@dataclass(frozen=True)
class Level:
    """One kind of noise."""

    words: str
    folders: tuple[str, ...]
    noise: Noise
    pooled_tokens: int
    """Tokens of a case whose rows are all spoilt."""


BOTH = ("float32_processed", "bfloat16_processed")
LEVELS = {
    "fp32": Level("engine in float32", ("float32_processed",), Noise(), 64),
    "bf16": Level("engine in bfloat16", ("bfloat16_processed",), Noise(), 64),
    "0.003-light": Level("KLD 0.003, light tails", BOTH, Noise(kld=0.003, tails="light"), 1024),
    "0.003-heavy": Level("KLD 0.003, heavy tails", BOTH, Noise(kld=0.003, tails="heavy"), 1024),
    "0.028-light": Level("KLD 0.028, light tails", BOTH, Noise(kld=0.028, tails="light"), 4096),
    "0.028-heavy": Level("KLD 0.028, heavy tails", BOTH, Noise(kld=0.028, tails="heavy"), 4096),
}


def main() -> None:
    """Measure one level."""
    parser = argparse.ArgumentParser(description="Figures of the fire drill.")
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--level", choices=LEVELS, required=True)
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=100, help="of each fault")
    parser.add_argument("--clean", type=int, default=sys.maxsize, help="clean rows, at most")
    parser.add_argument("--bootstrap", type=int, default=0, help="clean rows to make from the real ones")
    parser.add_argument("--draws", type=int, default=10, help="of other weights, of each kind and size")
    parser.add_argument("--codes", nargs="*", default=None, help="these faults only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.parts.mkdir(parents=True, exist_ok=True)
    part = arguments.parts / f"{arguments.level}.json"
    # Written after each stage: what is there stands, should the next one be stopped.
    for found in stages(arguments):
        part.write_text(json.dumps(found, indent=1))


def stages(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Everything of one level that is known so far: the cases, then clean rows, then those made from them."""
    level = LEVELS[arguments.level]
    paths = [arguments.rollouts / name for name in level.folders]
    model = load_model(arguments.model, device="cpu", dtype=torch.float32)
    pool = pool_of(paths, POOL_SAMPLES)
    scores = Scores(model, vocab_size=model_vocab_size(model), noise=level.noise, calibrate_on=pool.able)
    part: dict[str, Any] = {"level": arguments.level}
    for cases, sizes in planted(arguments, level, pool, scores):
        yield part | {"cases": cases.as_json(), "sizes": sizes}
    part |= {"cases": cases.as_json(), "sizes": sizes}
    if arguments.codes is None:
        part["clean_with_logits"] = clean_with_logits(pool, scores)
        told(f"clean with logits {part['clean_with_logits']}")
        yield part
        if arguments.level == OTHER_WEIGHTS_LEVEL:
            for counts in judged_with_other_weights(model, pool.able, draws=arguments.draws):
                part["other_weights"] = counts
                told(f"other weights {counts}")
                yield part
        rows = [scored_only(scores(sample)) for sample in pool_of(paths, arguments.clean).samples]
        part["clean"] = clean(rows)
        told(f"clean {part['clean']}")
        yield part
        for counts in clean_in_steps(bootstrapped(rows, num_rows=arguments.bootstrap, step_rows=STEP_ROWS)):
            yield part | {"bootstrap": counts}


def pool_of(paths: Sequence[Path], max_samples: int) -> Pool:
    """Rows of the rollouts."""
    rng = np.random.default_rng(0)
    return load_pool(paths, Statement(), max_samples=max_samples, rng=rng)


def planted(
    arguments: argparse.Namespace, level: Level, pool: Pool, scores: Scores
) -> Iterator[tuple[Tally, dict[str, list[int]]]]:
    """Every fault, `cases` times; and how often the size told was right, of how many. After each, so far."""
    options = DrillOptions(cases=arguments.cases, pooled_tokens=level.pooled_tokens, seed=1)
    tally = Tally()
    sizes: dict[str, list[int]] = {}
    for fault in the_faults():
        if arguments.codes is not None and fault.code not in arguments.codes:
            continue
        if CATALOGUE[fault.code].level == "sound" and arguments.level != SOUND_LEVEL:
            continue
        for case in range(options.cases):
            drilled = one_case(fault, case, pool, scores, options)
            if drilled is None:
                continue
            tally.add(drilled)
            right = is_right(drilled)
            if right is not None:
                count = sizes.setdefault(fault.code, [0, 0])
                count[0] += right
                count[1] += 1
        told(f"{fault.code}: {dict(tally.matrix.get(fault.code, {}))} {sizes.get(fault.code, '')}")
        yield tally, sizes


def scored_only(scored: Scored) -> Scored:
    """Without the logits, which ten thousand rows have no room for."""
    return replace(scored, logits=np.empty((len(scored.sample), 0), np.float32))


def clean_with_logits(pool: Pool, scores: Scores) -> dict[str, Any]:
    """All checks on rows as they are, with logits for those that ask, in steps."""
    rows = pool.samples[:LOGITS_ROWS]
    counts: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for start in range(0, len(rows), STEP_ROWS):
        for found in findings_of(rows[start : start + STEP_ROWS], scores, layout="packed"):
            counts[found.severity] += 1
            places[found.code] += 1
    return {"rows": len(rows), **counts, "codes": dict(places)}


def clean(rows: Sequence[Scored]) -> dict[str, Any]:
    """All checks on rows as they are, in steps."""
    counts: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for start in range(0, len(rows), STEP_ROWS):
        part = rows[start : start + STEP_ROWS]
        # The rows are scored already.
        for found in findings_of(part, _nobody, layout="packed"):
            counts[found.severity] += 1
            places[found.code] += 1
    return {"rows": len(rows), **counts, "codes": dict(places)}


class _Nobody:
    """There is nothing left to score."""

    vocab_size = None

    def __call__(self, sample: Sample) -> Scored:
        raise LookupError(sample.sample_id)


_nobody = _Nobody()


def clean_in_steps(steps: Iterator[Step]) -> Iterator[dict[str, Any]]:
    """What the trainer's side says of clean steps; now and then, so far, and in the end."""
    counts: Counter[str] = Counter()
    places: Counter[str] = Counter()
    num_rows = 0
    for batch, trainer in steps:
        judge = Judge(trainer_version=None)
        judge.add(measure(batch, trainer))
        for found in judge.verdict().findings:
            counts[found.severity] += 1
            places[found.code] += 1
        num_rows += len(batch.refs)
        if num_rows % TOLD_ROWS == 0:
            told(f"{num_rows} rows {dict(counts)} {dict(places)}")
            yield {"rows": num_rows, **counts, "codes": dict(places)}
    yield {"rows": num_rows, **counts, "codes": dict(places)}


def told(words: str) -> None:
    """Progress."""
    sys.stderr.write(words + "\n")


if __name__ == "__main__":
    main()
