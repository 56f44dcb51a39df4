"""Entries: what shows only where several ranks judge one step."""

from rlbatch.catalogue.entry import Entry

ENTRIES = (
    Entry(
        code="ranks-differ",
        level="ranks",
        severity="error",
        symptom="The ranks of one step are not at the same place of their loops.",
        check="Batches, trainer_version, mode of the gate, limits and samples of the step, on every rank.",
        likely="ranks were given different numbers of micro-batches, or one missed a weight update",
        fix="share a step out so that every rank has as many batches, and update all of them together",
    ),
    Entry(
        code="rank-silent",
        level="ranks",
        severity="error",
        symptom="A rank of the group did not come to the gate, or its process is gone.",
        check="The gathering of the verdict, which waits `Limits.rank_timeout` seconds.",
        likely="another rank crashed, raised before the gate, or has fewer steps",
        fix="read the log of the rank that is missing; raise rank_timeout where it is only slow",
    ),
)
