"""The parts that `measure_figures.py` wrote, as one document.

python tests/drill/render_figures.py --parts DIR --out tests/drill/figures.md
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure_figures import LEVELS

HEAD = """\
# What the fire drill finds

Real rollouts of `examples/tinylm`, sampled by vLLM 0.32.0 on CPU, other ones than those on which limits were
set; measured by `measure_figures.py`. A case is one fault, planted into one of eight rows or into all rows of
a step. `named`: its own code and no other cause; `size right`: of the named ones, those that say the right
lag, row or slots too, or the parameter within 5 %; `wrong`: another cause; `unexplained`: something is wrong,
and not what; `missed`: silence.

A draw whose fault moves too little to show beneath the noise is drawn again (`rlbatch/drill/shows.py`): a
case has 16 tokens in one row moved by twice the noise, or 64 nats of expected log likelihood over the rows of
a run.
"""

CLEAN = {
    "clean_with_logits": "clean rows that were judged with logits",
    "clean": "clean rows without",
    "bootstrap": "rows block-bootstrapped from them",
}


def main() -> None:
    """Read, write."""
    parser = argparse.ArgumentParser(description="Render the figures of the fire drill.")
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--note", default="", help="which state of the code was measured")
    arguments = parser.parse_args()
    arguments.out.write_text(rendered(arguments.parts, arguments.note))


def rendered(parts: Path, note: str) -> str:
    """The document, a chapter a level."""
    lines = [HEAD, note, ""] if note else [HEAD]
    for name, level in LEVELS.items():
        path = parts / f"{name}.json"
        if path.exists():
            part = json.loads(path.read_text())
            lines += [f"## {level.words}", "", *_cases(part["cases"], part["sizes"]), "", *_clean(part), ""]
    return "\n".join(lines)


def _cases(cases: dict[str, Any], sizes: dict[str, list[int]]) -> Iterator[str]:
    yield "| planted | cases | named | size right | wrong | unexplained | missed | said instead |"
    yield "|---|---|---|---|---|---|---|---|"
    for code, said in cases["matrix"].items():
        total, named, missed = sum(said.values()), said.get(code, 0), said.get("(nothing)", 0)
        unexplained = 0 if code == "unexplained" else said.get("unexplained", 0)
        wrong = total - named - missed - unexplained
        instead = ", ".join(f"{other} {n}" for other, n in said.items() if other not in (code, "(nothing)"))
        size = " of ".join(map(str, sizes[code])) if code in sizes else ""
        yield f"| {code} | {total} | {named} | {size} | {wrong} | {unexplained} | {missed} | {instead} |"
    sums = " | ".join(str(cases[name]) for name in ("wrong", "unexplained", "missed"))
    yield f"| all | {cases['planted']} | {cases['named']} | | {sums} | |"


def _clean(part: dict[str, Any]) -> Iterator[str]:
    for name, words in CLEAN.items():
        counts = part.get(name)
        if not counts or not counts["rows"]:
            continue
        codes = ", ".join(f"{code} {n}" for code, n in counts["codes"].items())
        errors, warnings = counts.get("error", 0), counts.get("warning", 0)
        yield f"{counts['rows']:,} {words}: {errors} errors, {warnings} warnings{codes and f' ({codes})'}.  "
    if "other_weights" in part:
        counts = part["other_weights"]
        codes = ", ".join(f"{where} {n}" for where, n in counts["wrong"].items())
        wrong = codes and f" ({codes})"
        yield f"{counts['steps']} steps of a trainer with other weights: {counts['named']} named{wrong}.  "


if __name__ == "__main__":
    main()
