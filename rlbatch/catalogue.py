"""One entry a code: the symptom, how it is found, the likely cause, the fix. Codes are permanent.

`finding` makes every `Finding`: a check says where, what it expected and what it found; the catalogue knows
the rest. `rlbatch explain CODE` prints an entry. Knows nothing of how the checks compute.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rlbatch.errors import Finding, Severity, Where

Level: TypeAlias = Literal["reply", "storage", "sound", "scoring", "aligned", "drift"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known of one code."""

    code: str
    level: Level
    """Where it can be found: in a reply, a file, samples alone, a model, against it, or in the aggregate."""
    severity: Severity
    """Unless the finding says otherwise."""
    symptom: str
    check: str
    """How it is found."""
    likely: str
    fix: str


def finding(
    code: str,
    *,
    expected: str,
    found: str,
    where: Where | None = None,
    likely: str | None = None,
    fix: str | None = None,
    severity: Severity | None = None,
) -> Finding:
    """A finding of a catalogued code; cause and fix are the catalogue's unless the check knows better.

    Raises:
        KeyError: the code is not in the catalogue.
    """
    entry = CATALOGUE[code]
    return Finding(
        code=code,
        severity=severity or entry.severity,
        where=where or Where(),
        expected=expected,
        found=found,
        likely=likely or entry.likely,
        fix=fix or entry.fix,
    )


_EXACT_IDS = (
    "ask the engine for exact ids (vLLM: return_token_ids) and parse with rlbatch.engines.parse_response"
)

_ENTRIES = (
    # -- what a reply or a record cannot be -------------------------------------------------------------
    Entry(
        code="reply-malformed",
        level="reply",
        severity="error",
        symptom="The payload is not JSON, or a field has the wrong type.",
        check="The body is decoded into typed structs; the decoder's complaint is the finding.",
        likely="the body was cut off, or is not the reply of this engine",
        fix="pass the reply's body exactly as the engine sent it",
    ),
    Entry(
        code="reply-error-body",
        level="reply",
        severity="error",
        symptom="The engine refused the request and the error body was read as a reply.",
        check="The body has `error` or `detail` instead of choices.",
        likely="the request failed and its status was not checked",
        fix="mend the request as the engine's message says; only replies with status 200 hold tokens",
    ),
    Entry(
        code="route-unsupported",
        level="reply",
        severity="error",
        symptom="The body is of a route that carries no exact tokens, or is a stream.",
        check="The body's shape is none of the engine's routes that report ids.",
        likely="a route that reports text only, or a request sent with stream=true",
        fix=(
            "use /v1/completions, /v1/chat/completions or /inference/v1/generate; "
            "feed streams to rlbatch.engines.ResponseAssembler"
        ),
    ),
    Entry(
        code="stream-truncated",
        level="reply",
        severity="error",
        symptom="A stream ended before it was whole.",
        check="Every choice needs a finish_reason, and the stream its `[DONE]`.",
        likely="the connection was closed, or the engine died in the middle",
        fix="leave this reply out and sample again; part of a completion is no completion",
    ),
    Entry(
        code="stream-disordered",
        level="reply",
        severity="error",
        symptom="The chunks of a stream cannot be in the order in which the engine sent them, each once.",
        check="Ids, offsets, running counts and ends of the chunks are compared with what came before.",
        likely="a proxy or a retry repeated, dropped or mixed chunks",
        fix="sample again without what sits between; stream_options.include_usage=true lets counts be proven",
    ),
    Entry(
        code="echo-unsupported",
        level="reply",
        severity="error",
        symptom="The logprobs cover the prompt as well as the completion, and nothing says how far.",
        check="More logprobs than ids by the prompt's length without a null in front, or a streamed echo.",
        likely="the request set echo=true",
        fix="send the request without echo, or not streamed",
    ),
    Entry(
        code="routed-experts-malformed",
        level="reply",
        severity="error",
        symptom="The record of routed experts is not an array of [rows, layers, experts a token].",
        check="`routed_experts` is decoded as base64 of a whole npy array of three axes.",
        likely="the field was cut off or re-encoded on its way",
        fix="pass the field as the engine sent it; leave the completion out where it cannot be had again",
    ),
    Entry(
        code="ids-missing",
        level="reply",
        severity="error",
        symptom="The reply has no ids of the sampled tokens.",
        check="`token_ids` of a choice is null or absent.",
        likely="the request did not ask for exact ids; text encoded again gives other tokens",
        fix="set return_token_ids=true in the request (vLLM 0.10.2 or newer)",
    ),
    Entry(
        code="prompt-ids-missing",
        level="reply",
        severity="error",
        symptom="Neither the reply nor the request has the ids of the prompt.",
        check="`prompt_token_ids` is null and the request's prompt is not a list of integers.",
        likely="a text prompt was sent without asking for its ids",
        fix="set return_token_ids=true, or send the prompt as ids and pass the request to parse_response",
    ),
    Entry(
        code="logprobs-missing",
        level="reply",
        severity="error",
        symptom="The reply has no logprobs at all.",
        check="`logprobs` of a choice with sampled tokens is null or absent.",
        likely="the request did not ask for logprobs",
        fix="set logprobs=0 (completions), logprobs=true (chat) or sampling_params.logprobs=0 (generate)",
    ),
    Entry(
        code="statement-contradicted",
        level="reply",
        severity="error",
        symptom="Two statements about the same thing disagree.",
        check="What is said twice (request, reply, provenance, file, flag) is compared.",
        likely="the request, the reply and the provenance do not belong together",
        fix="pass the request that produced this reply, and the provenance that was really in force",
    ),
    Entry(
        code="provenance-missing",
        level="reply",
        severity="error",
        symptom="Nobody says under which distribution the logprobs are.",
        check="A field of the provenance is stated by neither the file nor a flag.",
        likely="engines do not report it, and a server's defaults are not neutral",
        fix="state it with the flag that is named",
    ),
    # -- files -------------------------------------------------------------------------------------------
    Entry(
        code="file-unusable",
        level="storage",
        severity="error",
        symptom="A file is missing, empty, or of a kind that cannot be read.",
        check="Opening it failed, or its contents are of no known kind.",
        likely="the path is wrong, or the file is not a rollout file",
        fix="give a shard, a directory of shards, a recorded rollout (.json) or .jsonl of those",
    ),
    Entry(
        code="write-failed",
        level="storage",
        severity="error",
        symptom="A shard was not written; nothing of it was left behind.",
        check="Every system call of a write is watched, and every value must be one that a shard can hold.",
        likely="the disk is full, or the directory may not be written to",
        fix="make room, or name another directory, and write again",
    ),
    Entry(
        code="shard-truncated",
        level="storage",
        severity="error",
        symptom="A shard is shorter or longer than its header says.",
        check="The header's offsets are compared with the file's size.",
        likely="the file was cut off in a copy; rlbatch itself never leaves part of a shard",
        fix="copy the shard again from where it was written",
    ),
    Entry(
        code="shard-altered",
        level="storage",
        severity="error",
        symptom="A shard's contents are not those that were written.",
        check="crc32 of every array against the header's, on its first whole read.",
        likely="the file was changed after it was written, or the disk failed",
        fix="copy the shard again from where it was written; never edit shards in place",
    ),
    Entry(
        code="schema-unknown",
        level="storage",
        severity="error",
        symptom="A safetensors file is not an rlbatch shard of a version that this release reads.",
        check="The header's schema name and version.",
        likely="another program's file, or a newer rlbatch wrote it",
        fix="read it with the rlbatch that wrote it, or give the rollouts themselves",
    ),
    Entry(
        code="model-mismatch",
        level="storage",
        severity="error",
        symptom="The model or tokenizer at hand is not the one that the rollouts came from.",
        check="Stored tokenizer fingerprint and vocabulary size against those of the model directory.",
        likely="another checkpoint, or a tokenizer that was changed in between",
        fix="give the model directory that the engine served",
    ),
    # -- sound: known without a trainer ------------------------------------------------------------------
    Entry(
        code="length-mismatch",
        level="sound",
        severity="error",
        symptom="There are not as many logprobs as sampled ids.",
        check="The two lists are counted where they come from, before any array is made.",
        likely="the ids were encoded again from text, or stop tokens were cut from one list only",
        fix=_EXACT_IDS,
    ),
    Entry(
        code="routed-experts-mismatch",
        level="sound",
        severity="error",
        symptom="The record of routed experts does not have one row for each token that was passed through.",
        check="Rows are counted: prompt + completion - 1 - routed_experts_prompt_start.",
        likely="another start was in force than the request says, or rows were lost",
        fix="pass the request that produced this reply; a next turn starts at the rows already held, T - 1",
    ),
    Entry(
        code="routing-unreadable",
        level="sound",
        severity="error",
        symptom="The reply reports the experts of each token in a form whose shape it does not say.",
        check="Routing data without axes: SGLang's flat buffer, Fireworks' encoded rows or files.",
        likely="the request asked for routing data (return_routed_experts, include_routing_matrix)",
        fix="state Provenance.routing_shape for SGLang; ask Fireworks without routing data",
    ),
    Entry(
        code="token-out-of-range",
        level="sound",
        severity="error",
        symptom="A token id is not in the vocabulary.",
        check="Ids against the vocabulary size of provenance or model.",
        likely="a padded slot of the head was sampled, or the tokenizer belongs to another model",
        fix="drop the rollout at its source, and keep the engine from sampling ids beyond the tokenizer",
    ),
    Entry(
        code="logprob-missing",
        level="sound",
        severity="error",
        symptom="A sampled token has no logprob.",
        check="Nulls in a reply are counted before any array is made; in a sample, NaN at a sampled token.",
        likely="the engine reported null, or a reader turned a missing value into NaN",
        fix="find why the engine did not report it; never fill it in",
    ),
    Entry(
        code="logprob-not-finite",
        level="sound",
        severity="error",
        symptom="A logprob is infinite, or is the NaN that an engine reported.",
        check="Infinities at sampled tokens; in a reply, NaN too.",
        likely="the engine's logits were not finite: the whole row is suspect",
        fix="look for the fault in the engine (precision, kernel, weights); do not replace the value",
    ),
    Entry(
        code="logprob-sentinel",
        level="sound",
        severity="error",
        symptom="A logprob is a marker such as -9999.0, not a value.",
        check="Values of -9000 nats and below at sampled tokens.",
        likely="the engine drew a token that its own mask excludes, or a reader marked what was missing",
        fix="find why the engine has no value for the token; a ratio of exp(9999) is no ratio",
    ),
    Entry(
        code="logprob-positive",
        level="sound",
        severity="error",
        symptom="A logprob is above 0: a probability above 1.",
        check="Values above a rounding tolerance at sampled tokens.",
        likely="the engine returns logits (vLLM: --logprobs-mode raw_logits), or a sentinel",
        fix="start the engine with --logprobs-mode processed_logprobs",
    ),
    Entry(
        code="mask-without-logprob",
        level="sound",
        severity="error",
        symptom="A token is trained that nobody sampled.",
        check="loss_mask where turn is -1.",
        likely="the mask covers the prompt, a template's header or a tool's tokens",
        fix="train sampled tokens only; rlbatch.assemble.to_samples makes that mask",
    ),
    Entry(
        code="advantage-not-finite",
        level="sound",
        severity="error",
        symptom="The advantage of a trained token is NaN or infinite.",
        check="Advantages at trained tokens.",
        likely="a group of one, or of equal rewards, divided by its standard deviation",
        fix="mend what computes advantages; a group without spread has advantage 0",
    ),
    Entry(
        code="temperature-contradicted",
        level="sound",
        severity="error",
        symptom="The temperature of a sampled token is not the one its provenance states.",
        check="The temperature column against each turn's provenance; 1 where decoding was greedy.",
        likely="the column was written by hand, or the provenance is of another turn",
        fix="make samples with rlbatch.to_samples, which fills the column from the provenance",
    ),
    Entry(
        code="modes-mixed",
        level="sound",
        severity="error",
        symptom="One sample has turns with raw and turns with processed logprobs.",
        check="logprobs_mode of the provenances of its turns.",
        likely="the turns came from servers that were started differently",
        fix="serve all turns of a rollout with --logprobs-mode processed_logprobs",
    ),
    Entry(
        code="nothing-trained",
        level="sound",
        severity="warning",
        symptom="No token is trained.",
        check="loss_mask is False throughout a batch (warning) or a step (error).",
        likely="every completion is empty, or the mask was lost",
        fix="look at what wrote loss_mask; a step without trained tokens has no loss",
    ),
    Entry(
        code="incomparable",
        level="sound",
        severity="error",
        symptom="The engine's logprobs are of another distribution than the trainer can compute.",
        check="Provenance: raw or unknown values away from neutral sampling, truncation, penalties, masks.",
        likely="temperature, truncation or penalties that the reported values do not reflect, or not alone",
        fix="serve with --logprobs-mode processed_logprobs; sample without top-p, top-k, min-p, penalties",
    ),
    Entry(
        code="greedy-sampled",
        level="sound",
        severity="error",
        symptom="Tokens of temperature 0 are trained.",
        check="Provenance: temperature 0.",
        likely="evaluation rollouts among the training data",
        fix="sample with a temperature above 0; the most probable token is not a draw",
    ),
    Entry(
        code="turn-prefix-broken",
        level="sound",
        severity="warning",
        symptom="A turn's prompt does not extend what came before it.",
        check="Ids of the prompt against those of the turns before; the trajectory branches there.",
        likely="the history was rendered again (thinking stripped, template changed) or re-encoded",
        fix="send the exact ids of the earlier turns back to the engine",
    ),
    Entry(
        code="sample-too-long",
        level="sound",
        severity="error",
        symptom="A sample is longer than the budget of a batch.",
        check="Lengths against max_tokens; nothing is truncated.",
        likely="max_tokens is below the longest rollout",
        fix="raise max_tokens, or limit max_tokens of the sampling itself",
    ),
    # -- scoring: known of the model ---------------------------------------------------------------------
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
    # -- aligned: known against the trainer --------------------------------------------------------------
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
        fix=_EXACT_IDS,
    ),
    Entry(
        code="shifted-from",
        level="aligned",
        severity="error",
        symptom="From some token on, inference logprobs fit the trainer's of a neighbouring token.",
        check="Best split of a segment into lag 0 and another lag; both sides must fit by a margin.",
        likely="an entry was lost or put in inside the row: a dropped chunk, a stripped tag, re-encoding",
        fix=_EXACT_IDS,
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
    # -- drift: known in the aggregate -------------------------------------------------------------------
    Entry(
        code="kld-high",
        level="drift",
        severity="error",
        symptom="The inference KLD is high, though no fault was found.",
        check="Capped k3 over at least min_tokens trained tokens of one version against Limits.",
        likely="the engine runs other weights or another precision than it should",
        fix="check the weight sync, the engine's dtype and quantisation, and its attention backend",
    ),
    Entry(
        code="too-few-to-judge",
        level="drift",
        severity="warning",
        symptom="An audit cannot tell noise from a fault: few tokens, which do not agree closely.",
        check="Fewer than min_tokens compared tokens of one version, and segments that are not clean.",
        likely="a small file; or logprobs_mode or temperature stated wrongly, which looks just like this",
        fix="give more rollouts of the same weights, and check --logprobs-mode and --temperature",
    ),
    Entry(
        code="ratio-tail",
        level="drift",
        severity="warning",
        symptom="One token's log_ratio is beyond anything that noise explains.",
        check="|log_ratio| above Limits.ratio_tail nats at a trained token.",
        likely="a token that the trainer holds to be impossible: a masked logit, or a wrong id",
        fix="look at the token named; clip or mask the ratio in the loss",
    ),
)

CATALOGUE: dict[str, Entry] = {entry.code: entry for entry in _ENTRIES}
"""Every code."""
