"""What an audit found, as a table for people or as one JSON document.

Knows nothing of how it was found. Where the audit was not judged, the word for a file without fault is not
printed at all.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlbatch.errors import Finding, render
from rlbatch.figures import Figures

Verdict: TypeAlias = Literal["sound", "findings", "not-judged", "unusable"]

SCHEMA = "rlbatch.audit/1"
QUANTILES = (0.5, 0.9, 0.99, 0.999)

EXIT_CODES: dict[Verdict, int] = {"sound": 0, "findings": 1, "unusable": 2, "not-judged": 3}
PRECEDENCE: tuple[Verdict, ...] = ("unusable", "findings", "not-judged", "sound")
"""Of several files the first of these that any has is the verdict."""

MAX_FINDINGS_PRINTED = 4
"""Findings on the terminal, five lines each, so that the table and the verdict stay on one screen."""

_CLOSING: dict[Verdict, str] = {
    "sound": "sound: every token that was compared lines up",
    "findings": "findings: do not train on this before the errors above are mended",
    "unusable": "unusable: what could not be read was not audited",
    "not-judged": "not judged: too few tokens, or logprobs that cannot be compared; nothing is said of them",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileReport:
    """One file."""

    path: str
    verdict: Verdict
    num_samples: int
    """Samples read; entries that could not become one are findings."""
    figures: Figures
    """Over the tokens that were compared."""
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AuditReport:
    """All files of one audit."""

    files: tuple[FileReport, ...]

    @property
    def verdict(self) -> Verdict:
        """The first of `PRECEDENCE` that any file has."""
        found = {file.verdict for file in self.files}
        return next((verdict for verdict in PRECEDENCE if verdict in found), "unusable")

    @property
    def exit_code(self) -> int:
        """What the process ends with."""
        return EXIT_CODES[self.verdict]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of all files, in the order of the files."""
        return tuple(found for file in self.files for found in file.findings)

    @property
    def num_samples(self) -> int:
        """Those of all files."""
        return sum(file.num_samples for file in self.files)

    @property
    def figures(self) -> Figures:
        """Those of all files together."""
        total = Figures()
        for file in self.files:
            total = total.merge(file.figures)
        return total


def to_json(report: AuditReport) -> str:
    """One JSON document, schema `rlbatch.audit/1`; every number in it is finite."""
    return render_json(
        verdict=report.verdict,
        total=_figures(report.num_samples, report.figures),
        files=[
            {"path": file.path, "verdict": file.verdict, **_figures(file.num_samples, file.figures)}
            for file in report.files
        ],
        findings=report.findings,
    )


def failure_to_json(findings: Sequence[Finding]) -> str:
    """The same document where the audit could not begin: no files, verdict `unusable`."""
    return render_json(verdict="unusable", total=_figures(0, Figures()), files=[], findings=findings)


def render_json(
    *, verdict: Verdict, total: dict[str, Any], files: list[dict[str, Any]], findings: Sequence[Finding]
) -> str:
    """The document from its parts."""
    document = {
        "schema": SCHEMA,
        "verdict": verdict,
        "exit_code": EXIT_CODES[verdict],
        "total": total,
        "files": files,
        "findings": [_finding(found) for found in findings],
    }
    return json.dumps(document, indent=2, allow_nan=False)


def print_report(report: AuditReport, console: Console) -> None:
    """Table of files, the findings that matter most, and the verdict in one line."""
    console.print(_table(report))
    if report.findings:
        console.print()
        _print(console, findings_text(report.findings))
    console.print()
    refused = sum(found.code == "reply-error-body" for found in report.findings)
    if refused and report.verdict != "unusable":
        _print(console, f"{refused} recorded requests that the engine refused are left out")
    _print(console, _CLOSING[report.verdict])


def findings_text(findings: Sequence[Finding]) -> str:
    """A screen of findings, as errors print them, and how many more there are.

    Errors come first, and one of each code before a second of any.
    """
    order = _by_weight(findings)
    shown, rest = order[:MAX_FINDINGS_PRINTED], order[MAX_FINDINGS_PRINTED:]
    text = render(shown)
    if rest:
        counts = Counter(found.code for found in rest)
        kinds = ", ".join(f"{count} {code}" for code, count in counts.items())
        text += (
            f"\n... and {len(rest)} more of {len(findings)} findings ({kinds}); --format json has them all"
        )
    return text


def _by_weight(findings: Sequence[Finding]) -> list[Finding]:
    seen: Counter[str] = Counter()
    weights = []
    for at, found in enumerate(findings):
        weights.append((found.severity != "error", seen[found.code], at))
        seen[found.code] += 1
    return [findings[at] for *_, at in sorted(weights)]


def _table(report: AuditReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("file", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for name in ("samples", "tokens", "k1", "k3", "capped k3", "p50", "p99", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for file in report.files:
        table.add_row(
            Text(file.path), _word(file.verdict, report.verdict), *_cells(file.num_samples, file.figures)
        )
    if len(report.files) > 1:
        table.add_section()
        table.add_row(
            "total", _word(report.verdict, report.verdict), *_cells(report.num_samples, report.figures)
        )
    table.caption = "nats, over compared tokens; p50, p99 and max are of |log_ratio|"
    return table


def _word(verdict: Verdict, overall: Verdict) -> str:
    if verdict == "sound" and overall == "not-judged":
        return "no findings"
    return verdict.replace("-", " ")


def _cells(num_samples: int, figures: Figures) -> list[str]:
    values = [figures.k1, figures.k3, figures.inference_kld_capped]
    values += [figures.quantile(0.5), figures.quantile(0.99), figures.max_abs_log_ratio]
    shown = [f"{value:.2g}" if figures.num_tokens else "-" for value in values]
    return [f"{num_samples:,}", f"{figures.num_tokens:,}", *shown]


def _figures(num_samples: int, figures: Figures) -> dict[str, Any]:
    """null where nothing was compared: 0 would read as perfect agreement."""
    empty = not figures.num_tokens
    return {
        "num_samples": num_samples,
        "num_tokens": figures.num_tokens,
        "k1": None if empty else figures.k1,
        "k3": None if empty else figures.k3,
        "inference_kld_capped": None if empty else figures.inference_kld_capped,
        "max_abs_log_ratio": None if empty else figures.max_abs_log_ratio,
        "quantiles": {str(q): None if empty else figures.quantile(q) for q in QUANTILES},
    }


def _finding(found: Finding) -> dict[str, Any]:
    """The keys of the schema: an audit has no ranks, and no requests by name."""
    where = found.where
    return {
        "code": found.code,
        "severity": found.severity,
        "path": where.path,
        "sample": where.sample,
        "trajectory": where.trajectory,
        "turn": where.turn,
        "start": where.start,
        "stop": where.stop,
        "expected": found.expected,
        "found": found.found,
        "likely": found.likely,
        "fix": found.fix,
    }


def _print(console: Console, text: str) -> None:
    # Paths and codes stand in square brackets: nothing of it is markup.
    console.print(Text(text), soft_wrap=True)
