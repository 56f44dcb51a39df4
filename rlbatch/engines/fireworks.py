"""Fireworks' completions, not streamed: one `EngineOutput` a choice, from ids and logprobs in many places.

The provenance says which of two lists the turn's logprobs are: `processed` takes sampling_logprob, with
logprob kept apart as raw; otherwise logprob is taken. An echo is stripped where the request asked for one,
and refused where neither request nor usage tells it from sampled tokens that are like the prompt's end.
What holds for every engine (counts, nulls, finiteness) is left to `to_turn`.
"""

from collections.abc import Mapping, Sequence

from rlbatch.engines.agreement import (
    agreed_ids,
    agreed_logprobs,
    check_text,
    in_order,
    sent_prompts,
)
from rlbatch.engines.body import chunk_refusal, decode, no_reply
from rlbatch.engines.ending import check_ends
from rlbatch.engines.fireworks_reply import Body, Choice, Entry, places_of
from rlbatch.engines.fireworks_request import (
    Echo,
    echo_of,
    request_contradictions,
    request_max_tokens,
    request_prompts,
)
from rlbatch.engines.fireworks_routing import read_matrices
from rlbatch.engines.output import EngineOutput
from rlbatch.engines.parts import text_of
from rlbatch.engines.refusals import refusal
from rlbatch.engines.request import asks_for
from rlbatch.engines.usage import Counts, check_usage
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance, Usage


def read_reply(
    payload: object, request: Mapping[str, object] | None, provenance: Provenance
) -> list[EngineOutput]:
    """The choices of a reply, ordered by index.

    Raises:
        ReplyError: reply-malformed, reply-error-body, route-unsupported (a stream), ids-missing,
            logprobs-missing, length-mismatch, usage-mismatch, text-mismatch, echo-unsupported,
            routing-unreadable, routed-experts-malformed, routed-experts-mismatch or statement-contradicted.
    """
    body = decode(payload, Body)
    if body.choices is None or body.error is not None:
        raise no_reply(payload, complaint="an object that has no `choices`")
    if asks_for(request, "stream"):
        raise chunk_refusal("the request set stream=true")
    return outputs_of(body, request, provenance)


def outputs_of(
    body: Body, request: Mapping[str, object] | None, provenance: Provenance
) -> list[EngineOutput]:
    """The outputs of a whole body, where it is consistent; a stream ends here too."""
    found = request_contradictions(request, provenance)
    if found:
        raise ReplyError.of(*found)
    choices = in_order(body.choices or [])
    prompts = request_prompts(request)
    sent = sent_prompts(len(choices), prompts)
    outputs = [
        _output(body, choice, asked, echo_of(request), provenance)
        for choice, asked in zip(choices, sent, strict=True)
    ]
    if request is None:
        _check_no_echo(body.usage, outputs)
    check_usage(body.usage, outputs, num_prompts=prompts.count)
    check_ends(outputs, [request_max_tokens(request)] * len(outputs))
    return outputs


def _output(
    body: Body, choice: Choice, asked: Sequence[int] | None, echo: Echo, provenance: Provenance
) -> EngineOutput:
    label = choice.label
    if choice.finish_reason is None:
        raise chunk_refusal(f"{label} has no finish_reason, as in a chunk")
    _check_entries(choice)
    prompt = _prompt_ids(body, choice, asked)
    ids = _completion_ids(choice)
    raw, sampling = _logprobs(choice)
    wanted, kept = _chosen(label, raw, sampling, provenance, num_ids=len(ids))
    num_echoed = _num_echoed(label, ids, prompt, echo)
    if num_echoed:
        _check_echo(label, num_echoed, len(ids), raw, sampling)
    experts, start = read_matrices(
        body,
        choice,
        shape=provenance.routing_shape,
        num_prompt=len(prompt or ()),
        num_echoed=num_echoed,
        num_ids=len(ids),
    )
    # With several choices the counts are sums, which say nothing of one turn.
    counts = body.usage if len(body.choices or ()) == 1 else None
    return EngineOutput(
        label=label,
        prompt_token_ids=prompt,
        completion_token_ids=ids[num_echoed:],
        logprobs=None if wanted is None else wanted[num_echoed:],
        raw_logprobs=None if kept is None else kept[num_echoed:],
        finish_reason=choice.finish_reason,
        usage=Usage()
        if counts is None
        else Usage(num_prompt_tokens=counts.prompt_tokens, num_completion_tokens=counts.completion_tokens),
        # An echoed text begins with the prompt's.
        text=None if num_echoed else text_of(choice.text, choice.message),
        request_id=body.id,
        routed_experts=experts,
        routed_experts_start=start,
    )


def _prompt_ids(body: Body, choice: Choice, asked: Sequence[int] | None) -> list[int] | None:
    raw_output = None if choice.raw_output is None else choice.raw_output.prompt_token_ids
    said = {
        "choice.prompt_token_ids": choice.prompt_token_ids,
        "prompt_token_ids": body.prompt_token_ids,
        "raw_output": raw_output,
        "the request": asked,
    }
    return agreed_ids(f"{choice.label}, prompt", said)


def _completion_ids(choice: Choice) -> list[int]:
    """The ids as drawn, echoed prompt tokens included; all places agree."""
    said: dict[str, Sequence[int | None] | None] = {"token_ids": choice.token_ids}
    if choice.raw_output is not None:
        said["raw_output.completion_token_ids"] = choice.raw_output.completion_token_ids
    for place, logprobs in places_of(choice).items():
        said[f"{place}.token_ids"] = logprobs.token_ids
        if logprobs.content is not None:
            said[f"{place}.content"] = [entry.token_id for entry in logprobs.content]
    ids = agreed_ids(choice.label, said)
    if ids is None:
        fix = "set return_token_ids=true or raw_output=true in the request"
        found = f"{choice.label}: no ids in token_ids, raw_output or logprobs"
        raise refusal("ids-missing", "the exact ids of the sampled tokens", found, fix=fix)
    return ids


def _logprobs(choice: Choice) -> tuple[list[float | None] | None, list[float | None] | None]:
    """Raw and sampled logprobs, each where a place has it."""
    raw: dict[str, Sequence[float | None] | None] = {}
    sampling: dict[str, Sequence[float | None] | None] = {}
    for place, logprobs in places_of(choice).items():
        raw[f"{place}.token_logprobs"] = logprobs.token_logprobs
        if logprobs.content is not None:
            raw[f"{place}.content"] = [entry.logprob for entry in logprobs.content]
            sampling[f"{place}.content"] = [entry.sampling_logprob for entry in logprobs.content]
    return agreed_logprobs(choice.label, raw), agreed_logprobs(choice.label, sampling)


def _num_echoed(label: str, ids: Sequence[int], prompt: Sequence[int] | None, echo: Echo) -> int:
    """How many of the ids repeat the end of the prompt, as the request asked; they really do."""
    if not echo.asked:
        return 0
    if prompt is None:
        raise refusal("prompt-ids-missing", "the ids of an echoed prompt", f"{label}: none")
    num = len(prompt) if echo.last is None else min(echo.last, len(prompt))
    if list(ids[:num]) != list(prompt[len(prompt) - num :]):
        found = f"{label}: {len(ids)} ids that do not begin with the last {num} of the prompt"
        raise refusal("statement-contradicted", "the echo that the request asked for", found)
    return num


def _check_no_echo(usage: Counts | None, outputs: Sequence[EngineOutput]) -> None:
    """Without its request a reply may be an echo, unless usage counts every id as sampled."""
    num_ids = sum(len(output.completion_token_ids or ()) for output in outputs)
    if usage is not None and usage.completion_tokens == num_ids:
        return
    for output in outputs:
        num = _num_repeated(output.prompt_token_ids or (), output.completion_token_ids or ())
        if num:
            raise refusal(
                "echo-unsupported",
                "the request, or usage that counts the ids: either tells an echo from sampled tokens",
                f"{output.label}: the first {num} ids are the last {num} of the prompt",
                likely="the request set echo or echo_last, and was not passed with its reply",
                fix="pass the request that was sent as request=",
            )


def _num_repeated(prompt: Sequence[int], ids: Sequence[int]) -> int:
    """The most ids of the prompt's end with which the ids begin."""
    for num in range(min(len(prompt), len(ids)), 0, -1):
        if prompt[-num] == ids[0] and list(prompt[-num:]) == list(ids[:num]):
            return num
    return 0


def _check_echo(label: str, num_echoed: int, num_ids: int, *lists: Sequence[float | None] | None) -> None:
    for values in lists:
        if values is not None and len(values) != num_ids:
            found = f"{label}: {len(values)} logprobs for {num_ids} ids, {num_echoed} of them echoed"
            raise refusal("length-mismatch", "an echo whose ids and logprobs are aligned", found)


def _chosen(
    label: str,
    raw: list[float | None] | None,
    sampling: list[float | None] | None,
    provenance: Provenance,
    *,
    num_ids: int,
) -> tuple[list[float | None] | None, list[float | None] | None]:
    """The turn's own logprobs, and the raw ones beside them."""
    if provenance.logprobs_mode != "processed":
        return raw, None
    if sampling is None and num_ids:
        raise refusal(
            "logprobs-missing",
            "sampling_logprob for each token, since the provenance says processed",
            f"{label}: no sampling_logprob" + ("" if raw is None else ", only raw ones"),
            fix="ask for logprobs=true, or state logprobs_mode='raw' where the raw values are meant",
        )
    return sampling, raw


def _check_entries(choice: Choice) -> None:
    """One logprob of a sampled token that is among the most probable ones; tokens that make the text."""
    for place, logprobs in places_of(choice).items():
        for at, entry in enumerate(logprobs.content or ()):
            if _differs(entry):
                found = f"{choice.label}: {place}.content and its top_logprobs differ at token {at}"
                raise refusal("statement-contradicted", "one logprob of the sampled token", found)
        strings = [entry.token for entry in logprobs.content or () if entry.token is not None]
        check_text(choice.label, text_of(choice.text, choice.message), logprobs.tokens or strings)


def _differs(entry: Entry) -> bool:
    return any(
        top.logprob != entry.logprob
        for top in entry.top_logprobs or ()
        if top.token_id is not None and top.token_id == entry.token_id
    )
