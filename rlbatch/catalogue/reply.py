"""Entries: what a reply or a record cannot be."""

from rlbatch.catalogue.entry import Entry

ENTRIES = (
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
        check=(
            "Ids, offsets, running counts and ends of the chunks are compared with what came before. Where "
            "nothing counts the whole, no run of chunks may come twice in a row, and a choice that ended by "
            "its length must be that long."
        ),
        likely="a proxy or a retry repeated, dropped or mixed chunks",
        fix="sample again without what sits between; stream_options.include_usage=true lets counts be proven",
    ),
    Entry(
        code="echo-unsupported",
        level="reply",
        severity="error",
        symptom="The logprobs cover the prompt as well as the completion, and nothing says how far.",
        check=(
            "More logprobs than ids by the prompt's length without a null in front, a streamed echo, or ids "
            "that begin like the prompt's end where neither request nor usage says that they were sampled."
        ),
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
)
