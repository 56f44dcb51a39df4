"""Entries: what the arrays of a packed or padded batch show, without a trainer."""

from rlbatch.catalogue.entry import Entry

ENTRIES = (
    Entry(
        code="boundary-invalid",
        level="sound",
        severity="error",
        symptom="The boundaries of packed sequences are not where the sequences are.",
        check="cu_seqlens from 0 to T and rising; max_seqlen their longest; positions count on inside each.",
        likely="cu_seqlens of another batch, or made before padding was added or taken away",
        fix="make cu_seqlens, position_ids and max_seqlen in one place, as rlbatch.collate does",
    ),
    Entry(
        code="boundary-target",
        level="sound",
        severity="error",
        symptom="The last slot of a sequence is trained to predict the first token of the next.",
        check="loss_mask (aligned to targets) at the last slot of every sequence.",
        likely="ids, masks or labels of the whole pack were rolled by one, across the boundaries",
        fix="shift sequence by sequence: the last slot has target -100 and loss_mask False",
    ),
    Entry(
        code="boundary-trained",
        level="sound",
        severity="error",
        symptom="The first token of a sequence is trained, and nothing of its sequence comes before it.",
        check="loss_mask (aligned to tokens) at the first token of every sequence.",
        likely="a mask that covers the prompt, or one that was shifted across the boundaries",
        fix="leave the first token of every sequence out of the mask",
    ),
    Entry(
        code="positions-count-padding",
        level="sound",
        severity="error",
        symptom="Position ids count padding, so that the first token is not at position 0.",
        check="position_ids at the first token that attention sees in every row.",
        likely="positions are arange over the padded row; only rotary models forgive it",
        fix="count from the first real token: cumsum(attention_mask) - 1, as rlbatch.collate does",
    ),
    Entry(
        code="positions-not-restarted",
        level="sound",
        severity="error",
        symptom="Position ids run on from one packed sequence into the next.",
        check="position_ids at every boundary of cu_seqlens.",
        likely="positions are arange over the pack; what finds boundaries by positions sees one sequence",
        fix="begin at 0 in every sequence, as rlbatch.collate does",
    ),
    Entry(
        code="padding-too-short",
        level="sound",
        severity="error",
        symptom="The ranks that share a sequence cannot split it evenly.",
        check="Positions of every sequence against tensor_parallel, times 2 context_parallel in zigzag.",
        likely="a short or filler sequence was not padded for the parallel sizes",
        fix="pad every sequence to that multiple, fillers too",
    ),
    Entry(
        code="normalizer-mismatch",
        level="sound",
        severity="error",
        symptom="The loss is divided by another number than that of the trained tokens.",
        check="The normaliser of a token mean against the sum of loss_mask, or the step's total where given.",
        likely="the mask reached the numerator only, or positions were counted instead of trained tokens",
        fix="divide by the sum of loss_mask over the step, agreed across ranks and micro-batches; where the "
        "batch is a part of the step, give that sum as LayoutArrays.step_num_loss_tokens too",
    ),
    Entry(
        code="length-field-mismatch",
        level="sound",
        severity="error",
        symptom="A length field is not the number of trained tokens.",
        check="The field of every sequence against the sum of its loss_mask.",
        likely="the span from first to last was counted, tool tokens included",
        fix="count the mask; never subtract positions",
    ),
)
