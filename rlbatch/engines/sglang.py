"""SGLang's /generate, not streamed: one `EngineOutput` a completion, checked against itself and its request.

Ids stand in up to two lists, the prompt's in up to three, counts beside every list: all of it must agree.
What holds for every engine (counts, nulls, finiteness) is left to `to_turn`. Knows nothing of arrays.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlbatch.engines.agreement import check_text, sent_prompts
from rlbatch.engines.body import chunk_refusal
from rlbatch.engines.ending import check_ends
from rlbatch.engines.output import EngineOutput
from rlbatch.engines.parts import version_spans
from rlbatch.engines.refusals import refusal
from rlbatch.engines.request import asks_for
from rlbatch.engines.sglang_reply import Meta, Reply, Row, decode_replies
from rlbatch.engines.sglang_request import request_contradictions, request_max_tokens, request_prompts
from rlbatch.engines.sglang_routing import read_flat_routing
from rlbatch.engines.usage import check_cached, check_count
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance, Usage, VersionSpan


def read_reply(
    payload: object, request: Mapping[str, object] | None, provenance: Provenance
) -> list[EngineOutput]:
    """The completions of a reply, in the order of its list: prompt by prompt, n each.

    Raises:
        ReplyError: reply-malformed, reply-error-body, route-unsupported (a stream), ids-missing,
            length-mismatch, usage-mismatch, text-mismatch, finish-mismatch, statement-contradicted,
            routing-unreadable, routed-experts-malformed or routed-experts-mismatch.
    """
    if asks_for(request, "stream"):
        raise chunk_refusal("the request set stream=true")
    replies = decode_replies(payload)
    if not replies:
        raise refusal("reply-malformed", "at least one completion", "an empty list")
    return outputs_of(replies, request, provenance)


def outputs_of(
    replies: Sequence[Reply], request: Mapping[str, object] | None, provenance: Provenance
) -> list[EngineOutput]:
    """The outputs of whole replies, where each is consistent; a stream ends here too."""
    found = request_contradictions(request, provenance)
    if found:
        raise ReplyError.of(*found)
    sent = sent_prompts(len(replies), request_prompts(request))
    outputs = [
        _output(f"choice {index}", reply, asked, request, provenance)
        for index, (reply, asked) in enumerate(zip(replies, sent, strict=True))
    ]
    check_ends(outputs, request_max_tokens(request, len(outputs)))
    return outputs


def _output(
    label: str,
    reply: Reply,
    asked: Sequence[int] | None,
    request: Mapping[str, object] | None,
    provenance: Provenance,
) -> EngineOutput:
    meta, rows = reply.meta_info, reply.meta_info.output_token_logprobs
    if meta.finish_reason is None:
        raise chunk_refusal(f"{label} has no finish_reason, as in a chunk")
    ids = _completion_ids(label, reply.output_ids, rows)
    prompt = _prompt_ids(label, reply, asked)
    if rows is None or len(rows) == len(ids):
        # `to_turn` has more to say of lists of unequal lengths.
        _check_counts(label, meta, ids, rows, prompt)
        _check_top(label, meta.output_top_logprobs, rows)
    strings = [row.text for row in rows or () if row.text is not None]
    if len(strings) == len(rows or ()):
        check_text(label, reply.text, strings)
    routing, start = _routing(
        label, meta, provenance, request, num_prompt=len(prompt or ()), num_ids=len(ids)
    )
    return EngineOutput(
        label=label,
        prompt_token_ids=prompt,
        completion_token_ids=ids,
        logprobs=None if rows is None else [row.logprob for row in rows],
        finish_reason=meta.finish_reason.type,
        stop_reason=meta.finish_reason.matched,
        policy_versions=_spans(label, meta, num_ids=len(ids)),
        usage=Usage(num_prompt_tokens=meta.prompt_tokens, num_completion_tokens=meta.completion_tokens),
        text=reply.text,
        request_id=meta.id,
        routed_experts=routing,
        routed_experts_start=start,
    )


def _routing(
    label: str,
    meta: Meta,
    provenance: Provenance,
    request: Mapping[str, object] | None,
    *,
    num_prompt: int,
    num_ids: int,
) -> tuple[NDArray[np.integer] | None, int]:
    # Without a prompt there is no turn, which `to_turn` says.
    if meta.routed_experts is None or not num_prompt:
        return None, 0
    return read_flat_routing(
        meta.routed_experts,
        label=label,
        shape=provenance.routing_shape,
        num_prompt=num_prompt,
        num_completion=num_ids,
        request=request,
    )


def _completion_ids(label: str, listed: list[int] | None, rows: list[Row] | None) -> list[int]:
    """The sampled ids: `output_ids`, or those beside the logprobs; where both are there they are equal."""
    beside = [row.token_id for row in rows or ()]
    if listed is None:
        known = [token_id for token_id in beside if token_id is not None]
        if rows is None or len(known) < len(beside):
            found = f"{label}: no output_ids, and ids beside {len(known)} of {len(beside)} logprobs"
            raise refusal("ids-missing", "the exact ids of the sampled tokens", found, fix=_ASK_FOR_IDS)
        return known
    if not listed and len(beside) == 1:
        raise refusal(
            "length-mismatch",
            "one logprob for each sampled id",
            f"{label}: 1 logprob for 0 ids",
            likely="max_new_tokens=0: the engine reports a logprob of a token that it did not keep",
            fix="leave this completion out at its source; score prompts by input_token_logprobs",
        )
    # Unequal lengths are for `to_turn` to say.
    if len(beside) == len(listed) and any(token_id is not None for token_id in beside) and beside != listed:
        differing = [at for at, (a, b) in enumerate(zip(listed, beside, strict=True)) if a != b]
        found = f"{label}: {len(differing)} of {len(listed)} differ, first at sampled token {differing[0]}"
        raise refusal("statement-contradicted", "output_ids equal to the ids beside the logprobs", found)
    return listed


_ASK_FOR_IDS = "set return_logprob=true, whose rows hold the ids; SGLang 0.4.6 and newer send output_ids too"


def _prompt_ids(label: str, reply: Reply, asked: Sequence[int] | None) -> Sequence[int] | None:
    """The prompt's ids, from the reply, its input rows or the request; all that say them agree."""
    rows = reply.meta_info.input_token_logprobs or []
    scored = [row.token_id for row in rows]
    said = [ids for ids in (reply.prompt_token_ids, asked) if ids is not None]
    if rows and len(rows) == reply.meta_info.prompt_tokens and None not in scored:
        said.append([token_id for token_id in scored if token_id is not None])
    if not said:
        return None
    prompt = list(said[0])
    # Rows begin at logprob_start_len and end with the prompt.
    if any(list(ids) != prompt for ids in said) or (rows and scored != prompt[len(prompt) - len(rows) :]):
        lengths = ", ".join(str(len(ids)) for ids in said)
        found = f"{label}: lists of {lengths} ids, and {len(rows)} input rows, that differ"
        raise refusal("statement-contradicted", "the same prompt in reply, input rows and request", found)
    return prompt


def _check_counts(
    label: str, meta: Meta, ids: Sequence[int], rows: list[Row] | None, prompt: Sequence[int] | None
) -> None:
    check_count(label, "completion_tokens", meta.completion_tokens, len(ids))
    if rows is not None:
        check_count(label, "output_token_logprobs_length", meta.output_token_logprobs_length, len(rows))
    if prompt is not None:
        check_count(label, "prompt_tokens", meta.prompt_tokens, len(prompt))
        check_cached(label, meta.cached_tokens, len(prompt))


def _check_top(label: str, tops: list[list[Row] | None] | None, rows: list[Row] | None) -> None:
    """Where the sampled token is among the alternatives, its logprob is the same there."""
    if not tops:
        return
    if len(tops) != len(rows or ()):
        found = f"{label}: {len(tops)} lists of alternatives, {len(rows or ())} logprobs"
        raise refusal("statement-contradicted", "alternatives for each sampled token", found)
    for at, (top, row) in enumerate(zip(tops, rows or (), strict=True)):
        for other in top or ():
            if other.token_id is not None and other.token_id == row.token_id and other.logprob != row.logprob:
                found = f"{label}: they differ at sampled token {at}"
                raise refusal("statement-contradicted", "one logprob of the sampled token", found)


def _spans(label: str, meta: Meta, *, num_ids: int) -> tuple[VersionSpan, ...]:
    """The versions of the weights: spans where the reply has them, else its one label for all tokens."""
    if meta.weight_versions is not None:
        labels = [str(span.version) for span in meta.weight_versions]
        if meta.weight_version is not None and str(meta.weight_version) not in labels:
            found = f"{label}: the label of weight_version is none of {len(labels)} spans"
            raise refusal("statement-contradicted", "weight_version among the spans' labels", found)
        return version_spans(meta.weight_versions)
    if meta.weight_version is None:
        return ()
    return (VersionSpan(label=str(meta.weight_version), start=0, stop=num_ids),)
