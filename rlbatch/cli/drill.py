"""`rlbatch drill`: how much is drilled, and the table that shows it."""

import json
from pathlib import Path

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from rlbatch.cli.output import PLAIN_WIDTH
from rlbatch.drill import DrillOptions, Noise, Scores, Tally, load_pool, run_drill
from rlbatch.drill.pool import INFORMATIVE_BELOW, MIN_INFORMATIVE
from rlbatch.drill.run import OnProgress
from rlbatch.drill.tally import MISSED, UNEXPLAINED
from rlbatch.scoring import load_model, model_identity, model_vocab_size
from rlbatch.storage.statements import Statement

QUICK_CASES, QUICK_SAMPLES = 2, 256
CASES, SAMPLES = 20, 2048
"""Cases of each fault, and rollouts drawn to plant them in."""
READING_SHARE = 0.05
"""Of the progress bar."""


def drill(
    paths: list[Path],
    model: Path,
    statement: Statement,
    *,
    noise: Noise,
    quick: bool,
    seed: int,
    on_progress: OnProgress,
    device: str = "cpu",
    dtype: str = "float32",
) -> Tally:
    """Read, score, plant, judge.

    Raises:
        RlbatchError: rollouts or model cannot be used.
    """
    import torch

    loaded = load_model(model, device=device, dtype=getattr(torch, dtype))
    pool = load_pool(
        paths,
        statement,
        max_samples=QUICK_SAMPLES if quick else SAMPLES,
        rng=np.random.default_rng(seed),
        identity=model_identity(model, loaded),
        on_progress=lambda share: on_progress(READING_SHARE * share),
    )
    scores = Scores(
        loaded, vocab_size=model_vocab_size(loaded), noise=noise, calibrate_on=pool.able or pool.samples
    )
    return run_drill(
        pool,
        scores,
        DrillOptions(cases=QUICK_CASES if quick else CASES, seed=seed),
        on_progress=lambda share: on_progress(READING_SHARE + (1 - READING_SHARE) * share),
    )


def show_drill(tally: Tally, *, as_json: bool) -> None:
    """The result on stdout: one JSON document, or a table, a line of sums and the verdict."""
    if as_json:
        typer.echo(json.dumps(tally.as_json(), indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    console.print(_table(tally))
    if tally.no_place:
        typer.echo(
            f"\nnot tried, for no rollout of these could carry it: {', '.join(tally.no_place)}\n"
            f"({_why_not_tried(tally)})"
        )
    typer.echo(
        f"\n{tally.planted} faults planted: {tally.named} named, {tally.wrong} named wrongly, "
        f"{tally.unexplained} seen but not explained, {tally.missed} missed; "
        f"{tally.false_alarms} errors and {tally.false_warnings} warnings in {tally.num_clean} clean rows"
    )
    typer.echo(_closing(tally))


def _table(tally: Tally) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("planted", no_wrap=True)
    for name in ("cases", "named", "wrong", "unexplained", "missed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("said instead", overflow="fold")
    for code, told in tally.matrix.items():
        unexplained = 0 if code == UNEXPLAINED else told[UNEXPLAINED]
        wrong = told.total() - told[code] - unexplained - told[MISSED]
        instead = [f"{other} {count}" for other, count in told.items() if other not in (code, MISSED)]
        cells = [told.total(), told[code], wrong, unexplained, told[MISSED]]
        table.add_row(code, *(str(cell) if cell else "-" for cell in cells), ", ".join(instead))
    return table


def _why_not_tried(tally: Tally) -> str:
    if tally.num_able:
        return "too short, too certain, or all of one length: drill with more rollouts"
    return (
        f"of {tally.num_rows} rollouts fewer than two have {MIN_INFORMATIVE} tokens below "
        f"{INFORMATIVE_BELOW:g} nats, which these faults take to be seen: drill with longer rollouts"
    )


def _closing(tally: Tally) -> str:
    if tally.passed:
        rest = f"; {len(tally.no_place)} faults were not tried" if tally.no_place else ""
        return f"passed: nothing was missed or misnamed, and nothing was said of clean rows{rest}"
    if not tally.planted:
        return "failed: these rollouts offer no place for any fault, so nothing was shown"
    if tally.false_alarms:
        return "failed: clean rows raised errors; `rlbatch audit` says whether they are clean"
    return "failed: a fault was missed or misnamed on this model and these rollouts"
