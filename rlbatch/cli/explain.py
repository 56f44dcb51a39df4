"""`rlbatch explain`: what the catalogue knows of a code, as text."""

from difflib import get_close_matches

from rlbatch.catalogue import CATALOGUE, Entry


def entry_text(entry: Entry) -> str:
    """One entry, in full."""
    return "\n".join(
        [
            f"[{entry.code}] {entry.severity}, level {entry.level}",
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
        lines += ["", f"{level}:"] if lines else [f"{level}:"]
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
