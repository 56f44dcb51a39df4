"""What goes where: the report to stdout, as a table or one JSON document; errors to stderr.

Imports no torch.
"""

import typer
from rich.console import Console

from rlbatch.catalogue import finding
from rlbatch.errors import RlbatchError, render
from rlbatch.report import AuditReport, failure_to_json, findings_text, print_report, to_json

PLAIN_WIDTH = 160
"""Columns where stdout is no terminal and so has no width."""


def show(report: AuditReport, *, as_json: bool) -> None:
    """The report on stdout; with JSON there, what could not be used is on stderr for people as well."""
    if as_json:
        typer.echo(to_json(report))
        unusable = [found for file in report.files if file.verdict == "unusable" for found in file.findings]
        if unusable:
            typer.echo(findings_text(unusable), err=True)
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    print_report(report, console)


def show_failure(error: RlbatchError, *, as_json: bool) -> None:
    """An error on stderr, and as a JSON document on stdout where that was asked for."""
    typer.echo(error_text(error), err=True)
    if as_json:
        findings = error.findings or (
            finding("file-unusable", expected="input that can be used", found=str(error)),
        )
        typer.echo(failure_to_json(findings))


def error_text(error: RlbatchError) -> str:
    """The one rendering of its findings, under its name."""
    return f"{type(error).__name__}: {render(error.findings) if error.findings else error}"
