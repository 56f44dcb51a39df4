"""vLLM's whole replies: /v1/completions, /v1/chat/completions, /inference/v1/generate, and in process.

Checks a decoded reply against itself and against its request, and gives one `EngineOutput` a choice; streams
join here once their chunks are put together. What holds for every engine (counts, nulls, finiteness) is left
to `to_turn`. Knows nothing of records.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlbatch.engines.agreement import in_order, sent_prompts
from rlbatch.engines.body import chunk_refusal, decode, no_reply
from rlbatch.engines.ending import check_ends
from rlbatch.engines.output import EngineOutput
from rlbatch.engines.parts import text_of, version_spans
from rlbatch.engines.refusals import refusal
from rlbatch.engines.request import (
    Prompts,
    Route,
    asked_max_tokens,
    asks_for,
    contradictions,
    read_prompts,
    routing_request,
)
from rlbatch.engines.routing import read_routing, routing_start
from rlbatch.engines.usage import check_usage
from rlbatch.engines.vllm_object import body_of, is_request_output
from rlbatch.engines.vllm_reply import Body, Choice, UnreadBody, route_of
from rlbatch.engines.vllm_rows import Rows, rows_of
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance, Usage


def read_reply(
    payload: object, request: Mapping[str, object] | None, provenance: Provenance
) -> list[EngineOutput]:
    """The choices of a reply, ordered by index.

    Raises:
        ReplyError: reply-malformed, reply-error-body, route-unsupported, ids-missing, length-mismatch,
            usage-mismatch, text-mismatch, finish-mismatch, routed-experts-malformed, routed-experts-mismatch
            or statement-contradicted.
    """
    if is_request_output(payload):
        return outputs_of(body_of(payload), "generate", request, provenance)
    # Of JSON the alternatives are read last, and some at a time.
    body = decode(payload, Body if isinstance(payload, Mapping) else UnreadBody)
    route = route_of(body)
    if body.choices is None or body.error is not None or route is None:
        raise no_reply(payload, complaint="an object that has no `choices`, or an unknown `object`")
    _check_whole(body, body.choices, request)
    return outputs_of(body, route, request, provenance)


def outputs_of(
    body: Body, route: Route, request: Mapping[str, object] | None, provenance: Provenance
) -> list[EngineOutput]:
    """The choices of a whole body, ordered by index, once all that it says twice has been compared."""
    found = contradictions(request, route, provenance)
    if found:
        raise ReplyError.of(*found)
    choices = in_order(body.choices or [])
    prompts = read_prompts(request, route)
    prompt_ids = _prompt_ids(body, choices, prompts)
    rows = [
        rows_of(
            choice,
            route,
            prompt_ids=ids,
            prompt_logprobs=choice.prompt_logprobs if route == "completions" else body.prompt_logprobs,
            request=request,
        )
        for choice, ids in zip(choices, prompt_ids, strict=True)
    ]
    outputs = [
        _output(body, *parts, routing_request(request, route))
        for parts in zip(choices, prompt_ids, rows, strict=True)
    ]
    num_unasked = sum(each.num_unasked for each in rows)
    num_prompts = prompts.count if route == "completions" else 1
    check_usage(body.usage, outputs, num_prompts=num_prompts, num_unasked=num_unasked)
    check_ends(outputs, [asked_max_tokens(request, route)] * len(outputs))
    return outputs


def _output(
    body: Body,
    choice: Choice,
    prompt_ids: Sequence[int] | None,
    rows: Rows,
    routing: Mapping[str, object] | None,
) -> EngineOutput:
    usage = Usage()
    if body.usage is not None and len(body.choices or ()) == 1:
        # With several choices the counts are sums, which say nothing of one turn.
        usage = Usage(
            num_prompt_tokens=body.usage.prompt_tokens,
            num_completion_tokens=None if rows.num_unasked else body.usage.completion_tokens,
        )
    experts, start = _routing(choice, rows, prompt_ids, routing)
    return EngineOutput(
        label=choice.label,
        prompt_token_ids=prompt_ids,
        completion_token_ids=rows.token_ids,
        logprobs=rows.logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        policy_versions=version_spans(choice.weight_versions),
        usage=usage,
        # An echoed text may begin with the prompt's.
        text=None if rows.echoed and choice.token_ids is None else text_of(choice.text, choice.message),
        request_id=body.id if body.request_id is None else body.request_id,
        routed_experts=experts,
        routed_experts_start=start,
    )


def _routing(
    choice: Choice, rows: Rows, prompt_ids: Sequence[int] | None, request: Mapping[str, object] | None
) -> tuple[NDArray[np.integer] | None, int]:
    """The rows of routed experts, counted, and the token of the first."""
    experts = read_routing(choice.routed_experts, label=choice.label)
    if experts is None or not prompt_ids:
        # Without the prompt's ids `to_turn` refuses the choice.
        return experts, 0
    # Rows of an id that was not asked for are not of this turn either.
    num_rows = len(experts) - rows.num_unasked
    start = routing_start(
        num_rows,
        num_prompt=len(prompt_ids),
        num_completion=len(rows.token_ids),
        request=request,
        label=choice.label,
    )
    return experts[:num_rows], start


def _check_whole(body: Body, choices: Sequence[Choice], request: Mapping[str, object] | None) -> None:
    """Refuse a chunk of a stream, whose tokens are part of a completion's."""
    if asks_for(request, "stream"):
        raise chunk_refusal("the request set stream=true")
    if body.kind == "text_completion" and body.usage is None:
        # Whole replies of this route always have usage; a stream's last chunk differs in nothing else.
        raise chunk_refusal("one chunk of a completions stream (it has no usage)")
    for choice in choices:
        if choice.finish_reason is None:
            raise chunk_refusal(f"{choice.label} has no finish_reason, as in a chunk")


def _prompt_ids(body: Body, choices: list[Choice], prompts: Prompts) -> list[Sequence[int] | None]:
    """For each choice the reply's ids of its prompt, else the request's; all that are said must agree."""
    sent = sent_prompts(len(choices), prompts)
    result: list[Sequence[int] | None] = []
    for choice, asked in zip(choices, sent, strict=True):
        said = [ids for ids in (choice.prompt_token_ids, body.prompt_token_ids, asked) if ids is not None]
        for other in said[1:]:
            if other != said[0]:
                raise _prompt_contradiction(choice, said[0], other, "request" if other is asked else "body")
        result.append(said[0] if said else None)
    return result


def _prompt_contradiction(
    choice: Choice, said: Sequence[int], other: Sequence[int], place: str
) -> ReplyError:
    at = next((at for at, (a, b) in enumerate(zip(said, other, strict=False)) if a != b), None)
    where = "one is the beginning of the other" if at is None else f"they differ first at token {at}"
    return refusal(
        "statement-contradicted",
        "the same ids of the prompt in reply and request",
        f"{choice.label}: {len(said)} ids in the reply, {len(other)} in the {place}; {where}",
    )
