"""Entries: what trainer logprobs show, segment by segment."""

from rlbatch.catalogue.entry import EXACT_IDS, Entry

ENTRIES = (
    Entry(
        code="batch-mismatch",
        level="aligned",
        severity="error",
        symptom="The trainer logprobs are not those of this batch.",
        check="Shape, dtype and device against the batch's.",
        likely="logprobs of another micro-batch, or of a sliced or shifted forward pass",
        fix="pass rlbatch.scoring.trainer_logprobs(model, batch), or [B, T] logprobs of batch.target_ids",
    ),
    Entry(
        code="trainer-not-finite",
        level="aligned",
        severity="error",
        symptom="The trainer's logprob of a trained token is NaN or infinite.",
        check="Trainer logprobs at trained positions.",
        likely="the trainer's logits are not finite, or the token lies outside a mask applied to them",
        fix="look for the first non-finite activation; the gate ran before any gradient",
    ),
    Entry(
        code="shifted",
        level="aligned",
        severity="error",
        symptom="Inference logprobs fit the trainer's of a neighbouring token.",
        check="Mean clipped |difference| at lags -2..2; another lag explains what lag 0 does not.",
        likely="one of the two lists has an entry too many or too few in front",
        fix=EXACT_IDS,
    ),
    Entry(
        code="shifted-from",
        level="aligned",
        severity="error",
        symptom="From some token on, inference logprobs fit the trainer's of a neighbouring token.",
        check="Best split of a segment into lag 0 and another lag; both sides must fit by a margin.",
        likely="an entry was lost or put in inside the row: a dropped chunk, a stripped tag, re-encoding",
        fix=EXACT_IDS,
    ),
    Entry(
        code="zero-filled",
        level="aligned",
        severity="error",
        symptom="Logprobs are exactly 0 where the trainer's probability is not 1.",
        check="Exact zeros that the parameters in force rule out, the trainer below -1e-3 nats.",
        likely="missing logprobs were filled with 0, or the lists were padded to one length",
        fix="find what the engine did not report, and let it fail there; 0 means probability 1",
    ),
    Entry(
        code="unexplained",
        level="aligned",
        severity="error",
        symptom="A segment's logprobs are far from the trainer's and no known cause explains it.",
        check="Mean clipped |log_ratio| of a segment is gross at lag 0 and no hypothesis fits.",
        likely="logprobs of other tokens or of another model",
        fix="compare one row by hand: ids, logprobs and the weights that the engine served",
    ),
)
