"""`rlbatch explain`: what the catalogue knows of a code, as text."""

from difflib import get_close_matches

from rlbatch.catalogue import CATALOGUE, Entry
from rlbatch.catalogue.entry import Level

FOUND: dict[Level, str] = {
    "reply": "in the reply of an engine",
    "storage": "in a file",
    "sound": "in samples or batches alone, before any trainer is asked",
    "scoring": "in the trainer's model",
    "aligned": "against the trainer's logprobs, segment by segment",
    "drift": "in the aggregate of a step or a file",
    "ranks": "between the ranks of a group",
}
"""Where each level finds its codes, in words."""


def entry_text(entry: Entry) -> str:
    """One entry, in full."""
    return "\n".join(
        [
            f"[{entry.code}] {entry.severity}, found {FOUND[entry.level]}",
            f"  symptom: {entry.symptom}",
            f"  check:   {entry.check}",
            f"  likely:  {entry.likely}",
            f"  fix:     {entry.fix}",
        ]
    )


def list_text() -> str:
    """Every code with its symptom, by level, in the catalogue's order."""
    width = max(map(len, CATALOGUE))
    lines: list[str] = []
    for level in dict.fromkeys(entry.level for entry in CATALOGUE.values()):
        heading = f"{level}, found {FOUND[level]}:"
        lines += ["", heading] if lines else [heading]
        lines += [
            f"  {entry.code:<{width}}  {entry.symptom}"
            for entry in CATALOGUE.values()
            if entry.level == level
        ]
    return "\n".join(lines)


def unknown_text(code: str) -> str:
    """What to say of a code that does not exist."""
    near = get_close_matches(code, CATALOGUE, cutoff=0.5)
    hint = f"; near: {', '.join(near)}" if near else "; `rlbatch explain` lists all codes"
    return f"no code {code!r}{hint}"
