"""Entries: what a model shows while it scores."""

from rlbatch.catalogue.entry import Entry

ENTRIES = (
    Entry(
        code="packing-leak",
        level="scoring",
        severity="error",
        symptom="The model attends across the boundaries of packed sequences.",
        check="Short sequences packed and alone; then the first exchanged, which must not move the others.",
        likely="the forward makes a cache or mask of its own, or the model has state-space layers",
        fix="use the padded layout, or call the model with model_inputs(batch) and nothing else",
    ),
    Entry(
        code="head-unknown",
        level="scoring",
        severity="error",
        symptom="The model does something to its logits, after the head, that is not known.",
        check="Made-up outputs of the head must come out as the known transform says; once a model.",
        likely="a soft-cap, scale, bias, mask or cast that this version of rlbatch does not know",
        fix="compute logits with model(**model_inputs(batch)) and use rlbatch_kernels.token_logprobs",
    ),
    Entry(
        code="head-unusable",
        level="scoring",
        severity="error",
        symptom="The output head cannot be overridden.",
        check="Its class, its weight's dtype, and whether its forward is its own.",
        likely="the head is quantised, adapted or offloaded, or the model is wrapped",
        fix="pass the transformers model itself, or use rlbatch_kernels.token_logprobs on its logits",
    ),
    Entry(
        code="head-sharded",
        level="scoring",
        severity="error",
        symptom="The head's weight is not whole where it is used.",
        check="Its kind and size when the head's forward runs.",
        likely="the head runs outside the forward of the wrapped model, or is split by tensor parallelism",
        fix="call the wrapped model, whose hooks gather the weight; keep the head out of tensor parallelism",
    ),
    Entry(
        code="head-inputs",
        level="scoring",
        severity="error",
        symptom="Inside logprob_head the model was called for other positions than the batch's.",
        check="Shape of the head's input against the batch.",
        likely="another batch, logits_to_keep, or a slice of the batch",
        fix="call model(**model_inputs(batch)) with the batch that logprob_head was given",
    ),
    Entry(
        code="device-missing",
        level="scoring",
        severity="error",
        symptom="The device asked for is not on this machine.",
        check="CUDA's own count of its devices.",
        likely="no GPU is visible to this process, or torch was installed for CPU",
        fix="name a device that is there, or cpu",
    ),
)
