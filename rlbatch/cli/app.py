"""The commands: what they take, what they print where, and what they end with.

stdout has the answer and nothing else; errors and progress go to stderr. What needs torch is imported inside
the commands, so that help and `explain` come at once.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from rlbatch.catalogue import CATALOGUE
from rlbatch.cli.explain import entry_text, list_text, unknown_text
from rlbatch.cli.options import DTYPES, FORMATS, one_of, with_statement
from rlbatch.cli.output import show, show_failure
from rlbatch.cli.progress import LateProgress
from rlbatch.errors import RlbatchError
from rlbatch.storage.statements import ModelIdentity, Statement

UNUSABLE = 2
"""Exit code of everything that could not be done; a usage error has it too."""

DEFAULT_MAX_TOKENS = 16384

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: the boxes cut the names of flags off at 80 columns.
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True, no_args_is_help=True)
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, show_default=False)
    ] = False,
) -> None:
    """Exact tokens and logprobs from the engine to the loss."""
    if version:
        typer.echo(f"rlbatch {metadata.version('rlbatch')}")
        raise typer.Exit


Paths = Annotated[
    list[Path],
    typer.Argument(
        help="Shards, directories of shards, recorded rollouts or replies (.json), .jsonl of those."
    ),
]


SkipRefused = Annotated[
    bool,
    typer.Option(
        "--skip-refused",
        help="Leave out recorded requests that the engine refused (HTTP errors); count them.",
    ),
]


def main() -> None:
    """The `rlbatch` program."""
    try:
        app()
    except Exception:
        # Python itself would end with 1, which says "findings".
        traceback.print_exc()
        raise SystemExit(UNUSABLE) from None


@app.command()
@with_statement
def audit(
    paths: Paths,
    model: Annotated[Path, typer.Option(help="Directory of the model that sampled, to score with.")],
    statement: Statement,
    format: Annotated[str, typer.Option(**one_of(FORMATS))] = "terminal",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the weights.", **one_of(DTYPES))] = "float32",
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Budget of one batch, padding included.")
    ] = DEFAULT_MAX_TOKENS,
    trainer_version: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="policy_version of the model's weights. Without it they are taken for those that sampled.",
        ),
    ] = None,
    skip_refused: SkipRefused = False,
) -> None:
    """Say whether engine and trainer agree on stored rollouts.

    Ends with 0 where all files pass, 1 on a finding of severity error, 2 on what cannot be used, 3 where a
    file could not be judged. The flags from --engine on state what recorded JSON leaves open; a field that
    neither states is an error.
    """
    as_json = format == "json"
    with _errors_told(as_json=as_json), LateProgress("auditing") as progress:
        import torch

        from rlbatch.audit import AuditOptions, load_scorer
        from rlbatch.audit import audit as audit_files

        scorer = load_scorer(model, device=device, dtype=getattr(torch, dtype))
        options = AuditOptions(
            statement=statement,
            max_tokens=max_tokens,
            trainer_version=trainer_version,
            skip_refused=skip_refused,
        )
        report = audit_files(paths, scorer, options, on_progress=progress)
    show(report, as_json=as_json)
    raise typer.Exit(report.exit_code)


@app.command()
@with_statement
def convert(
    paths: Paths,
    out: Annotated[Path, typer.Option(help="Directory for the shards; must not hold any.")],
    statement: Statement,
    model: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            help="Directory of the model that sampled: its vocabulary, BOS, EOS and tokenizer are stored.",
        ),
    ] = None,
    skip_refused: SkipRefused = False,
) -> None:
    """Write recorded rollouts as shards, all or none.

    The flags from --engine on state what recorded JSON leaves open; a field that neither states is an error.
    """
    from rlbatch.cli.convert import convert as write

    with _errors_told():
        identity = None if model is None else _identity(model)
        done = write(paths, out, statement=statement, identity=identity, skip_refused=skip_refused)
    counts = Counter(found.code for found in done.warnings)
    if counts:
        typer.echo("warnings: " + ", ".join(f"{count} {code}" for code, count in counts.items()), err=True)
    typer.echo(f"{out}: {len(done.paths)} shards, {done.num_samples:,} samples, {done.num_tokens:,} tokens")


@app.command()
@with_statement
def drill(
    paths: Paths,
    model: Annotated[Path, typer.Option(help="Directory of the model that sampled, to score with.")],
    statement: Statement,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, in well under a minute.")] = False,
    format: Annotated[str, typer.Option(**one_of(FORMATS))] = "terminal",
    seed: Annotated[int, typer.Option(min=0, help="Decides rows, places and sizes.")] = 0,
    noise_kld: Annotated[
        float, typer.Option(min=0, max=1, help="KLD, nats, that the trainer's logits are moved by first.")
    ] = 0.0,
    tails: Annotated[str, typer.Option(help="Of that noise.", **one_of(("light", "heavy")))] = "light",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the weights.", **one_of(DTYPES))] = "float32",
) -> None:
    """Plant every known fault into copies of good rollouts, in memory, and show what is said of each.

    Ends with 0 where every fault is named, or at least seen, and clean rows are silent; with 1 where one is
    missed or misnamed, or a clean row raises an error; with 2 on what cannot be used. The flags from --engine
    on state what recorded JSON leaves open.
    """
    as_json = format == "json"
    with _errors_told(as_json=as_json), LateProgress("drilling") as progress:
        from rlbatch.cli.drill import drill as run_drill
        from rlbatch.cli.drill import show_drill
        from rlbatch.drill import Noise

        tally = run_drill(
            paths,
            model,
            statement,
            noise=Noise(kld=noise_kld, tails="heavy" if tails == "heavy" else "light"),
            quick=quick,
            seed=seed,
            on_progress=progress,
            device=device,
            dtype=dtype,
        )
    show_drill(tally, as_json=as_json)
    raise typer.Exit(0 if tally.passed else 1)


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(show_default=False, help="Without it, all codes.")] = None,
) -> None:
    """Say what a code means, and how to mend it."""
    if code is None:
        typer.echo(list_text())
        return
    if code not in CATALOGUE:
        typer.echo(unknown_text(code), err=True)
        raise typer.Exit(UNUSABLE)
    typer.echo(entry_text(CATALOGUE[code]))


@app.command()
def demo() -> None:
    """Show what is said of each known fault; needs no model."""
    from rlbatch.cli.demo import run

    with _errors_told():
        went_well = []
        for paragraph, as_expected in run():
            typer.echo(paragraph + "\n")
            went_well.append(as_expected)
    raise typer.Exit(0 if all(went_well) else UNUSABLE)


@contextmanager
def _errors_told(*, as_json: bool = False) -> Iterator[None]:
    """Errors of rlbatch as text on stderr, without a traceback, and as the one document where that is due."""
    try:
        yield
    except RlbatchError as error:
        show_failure(error, as_json=as_json)
        raise typer.Exit(UNUSABLE) from None


def _identity(model: Path) -> ModelIdentity:
    import torch

    from rlbatch.audit import load_scorer

    return load_scorer(model, device="cpu", dtype=torch.float32).identity
