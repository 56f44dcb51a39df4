"""Rows that nothing in their own batch explains, kept until the step is whole: another may have their values.

Only suspects are kept, by value, so that no batch is held for them. A row that gave its values away is off
itself, so that both rows of an exchange are among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlbatch.alignment.evidence import Evidence, Rows
from rlbatch.alignment.hypotheses.places import rows_permuted
from rlbatch.errors import Finding

MOST_STRAYS = 256
"""Rows kept of one step: where more are off, a queue's order is told from these."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stray:
    """A row that is off, and what was told of it."""

    evidence: Evidence
    """Copies; without logits."""
    found: Finding

    @classmethod
    def of(cls, evidence: Evidence, found: Finding) -> "Stray":
        """Copy what is compared."""
        kept = replace(
            evidence,
            trainer=evidence.trainer.copy(),
            inference=evidence.inference.copy(),
            trained=evidence.trained.copy(),
            versions=evidence.versions.copy(),
            context=replace(evidence.context, ids=evidence.context.ids.copy()),
            rows=lambda: Rows.of(()),
            ask=None,
            windows={},
        )
        return cls(evidence=kept, found=found)


def in_other_batches(strays: Sequence[Stray]) -> dict[int, Finding]:
    """`rows-permuted` in place of what was told of a row, by the id of that finding.

    Args:
        strays: of all batches of a step.
    """
    if len({stray.evidence.place.batch for stray in strays}) < 2:
        return {}
    everyone = Rows.of(stray.evidence for stray in strays)
    told = {}
    for stray in strays:
        found = rows_permuted(replace(stray.evidence, rows=lambda: everyone))
        if found is not None:
            told[id(stray.found)] = found
    return told
