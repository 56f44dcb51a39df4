"""vLLM's replies, not streamed: /v1/completions, /v1/chat/completions and /inference/v1/generate.

Checks a decoded reply against itself and against its request, and gives one `EngineOutput` a choice. What
holds for every engine (counts, nulls, finiteness) is left to `to_turn`. Knows nothing of records or arrays.
"""

from collections.abc import Mapping, Sequence

from rlbatch.catalogue import finding
from rlbatch.engines.body import chunk_refusal, decode, refusal
from rlbatch.engines.output import EngineOutput
from rlbatch.engines.request import Prompts, Route, asks_for, contradictions, read_prompts
from rlbatch.engines.vllm_reply import (
    Body,
    Choice,
    Counts,
    logprobs_of,
    route_of,
    spans_of,
    spelt_ids_of,
    text_of,
)
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance, Usage

MAX_INDICES_SHOWN = 8


def read_reply(
    payload: object, request: Mapping[str, object] | None, provenance: Provenance
) -> list[EngineOutput]:
    """The choices of a reply, ordered by index.

    Raises:
        ReplyError: reply-malformed, reply-error-body, route-unsupported, echo-unsupported, ids-missing,
            routed-experts-unsupported or statement-contradicted.
    """
    body = decode(payload, Body)
    route = route_of(body)
    if body.choices is None or body.error is not None or route is None:
        raise refusal(payload, complaint="an object that has no `choices`, or an unknown `object`")
    _check_whole(body, body.choices, request)
    found = contradictions(request, route, provenance)
    if found:
        raise ReplyError.of(*found)
    choices = _in_order(body.choices)
    prompts = read_prompts(request, route)
    prompt_ids = _prompt_ids(body, choices, prompts)
    for choice in choices:
        _check_choice(choice, route)
    outputs = [
        _output(body, choice, ids, route=route) for choice, ids in zip(choices, prompt_ids, strict=True)
    ]
    _check_usage(body.usage, outputs, num_prompts=prompts.count if route == "completions" else 1)
    return outputs


def _output(body: Body, choice: Choice, prompt_ids: Sequence[int] | None, *, route: Route) -> EngineOutput:
    usage = Usage()
    if body.usage is not None and len(body.choices or ()) == 1:
        # With several choices the counts are sums, which say nothing of one turn.
        usage = Usage(
            num_prompt_tokens=body.usage.prompt_tokens, num_completion_tokens=body.usage.completion_tokens
        )
    return EngineOutput(
        label=choice.label,
        prompt_token_ids=prompt_ids,
        completion_token_ids=choice.token_ids,
        logprobs=logprobs_of(choice, route),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        policy_versions=spans_of(choice),
        usage=usage,
        text=text_of(choice),
        request_id=body.id if body.request_id is None else body.request_id,
    )


def _check_whole(body: Body, choices: list[Choice], request: Mapping[str, object] | None) -> None:
    """Refuse a chunk of a stream, whose tokens are part of a completion's, and an echo."""
    if asks_for(request, "stream"):
        raise chunk_refusal("the request set stream=true")
    if body.kind == "text_completion" and body.usage is None:
        # Whole replies of this route always have usage; a stream's last chunk differs in nothing else.
        raise chunk_refusal("one chunk of a completions stream (it has no usage)")
    for choice in choices:
        if choice.finish_reason is None:
            raise chunk_refusal(f"{choice.label} has no finish_reason, as in a chunk")
    if asks_for(request, "echo"):
        raise _refusal("echo-unsupported", "logprobs of the completion alone", "the request set echo=true")


def _in_order(choices: list[Choice]) -> list[Choice]:
    ordered = sorted(choices, key=lambda choice: choice.index)
    if not ordered:
        raise _refusal("reply-malformed", "at least one choice", "an empty list of choices")
    if [choice.index for choice in ordered] != list(range(len(ordered))):
        shown = ", ".join(str(choice.index) for choice in ordered[:MAX_INDICES_SHOWN])
        raise _refusal("reply-malformed", f"choices 0 to {len(ordered) - 1}, each once", f"indices {shown}")
    return ordered


def _prompt_ids(body: Body, choices: list[Choice], prompts: Prompts) -> list[Sequence[int] | None]:
    """For each choice the reply's ids of its prompt, else the request's; both must agree."""
    sent = _sent_prompts(len(choices), prompts)
    result: list[Sequence[int] | None] = []
    for choice, asked in zip(choices, sent, strict=True):
        said = body.prompt_token_ids if choice.prompt_token_ids is None else choice.prompt_token_ids
        if said is not None and asked is not None and said != asked:
            raise _prompt_contradiction(choice, said, asked)
        result.append(asked if said is None else said)
    return result


def _prompt_contradiction(choice: Choice, said: Sequence[int], asked: Sequence[int]) -> ReplyError:
    at = next((at for at, (a, b) in enumerate(zip(said, asked, strict=False)) if a != b), None)
    place = "one is the beginning of the other" if at is None else f"they differ first at token {at}"
    return _refusal(
        "statement-contradicted",
        "the same ids of the prompt in reply and request",
        f"{choice.label}: {len(said)} ids in the reply, {len(asked)} in the request; {place}",
    )


def _sent_prompts(num_choices: int, prompts: Prompts) -> list[Sequence[int] | None]:
    """The request's ids of the prompt of each choice: choice i belongs to prompt i // n."""
    if prompts.token_ids is None:
        return [None] * num_choices
    num_prompts = len(prompts.token_ids)
    each = prompts.num_choices
    if each is None:
        each = num_choices // num_prompts if num_prompts else 0
    if each * num_prompts != num_choices:
        n = "n unsaid" if prompts.num_choices is None else f"n={prompts.num_choices}"
        raise _refusal(
            "statement-contradicted",
            "as many choices as the request asked for",
            f"{num_choices} choices; the request has {num_prompts} prompts, {n}",
        )
    return [ids for ids in prompts.token_ids for _ in range(each)]


def _check_choice(choice: Choice, route: Route) -> None:
    if choice.routed_experts is not None:
        raise _refusal("routed-experts-unsupported", "`routed_experts` null", f"{choice.label}: it is not")
    if choice.logprobs is not None:
        other = choice.logprobs.content if route == "completions" else choice.logprobs.token_logprobs
        if other is not None:
            place = "logprobs.token_logprobs" if route == "completions" else "logprobs.content"
            found = f"{choice.label}: logprobs in another place, where other engines have them"
            raise _refusal("reply-malformed", f"vLLM's {place} in a reply of {route}", found)
    spelt = spelt_ids_of(choice)
    if choice.token_ids is None:
        hint = "; the strings of its tokens spell ids, which this release does not read" if spelt else ""
        found = f"{choice.label}: `token_ids` is null or absent{hint}"
        raise _refusal("ids-missing", "the exact ids of the sampled tokens", found)
    # Unequal lengths are for `to_turn` to say.
    if spelt and len(spelt) == len(choice.token_ids) and spelt != choice.token_ids:
        differing = [at for at, (a, b) in enumerate(zip(choice.token_ids, spelt, strict=True)) if a != b]
        raise _refusal(
            "statement-contradicted",
            "the ids beside the logprobs equal to token_ids",
            f"{choice.label}: {len(differing)} of {len(spelt)} differ, first at sampled token {differing[0]}",
        )


def _check_usage(usage: Counts | None, outputs: list[EngineOutput], *, num_prompts: int | None) -> None:
    """Counts of the reply against its lists; `num_prompts` None where only the sum over choices is known."""
    if usage is None or any(_uneven(output) for output in outputs):
        # Lists of unequal lengths are refused by `to_turn`, which has more to say.
        return
    num_ids = sum(len(output.completion_token_ids or ()) for output in outputs)
    _check_count("completion_tokens", usage.completion_tokens, num_ids)
    if len(outputs) == 1:
        num_prompts = 1
    if num_prompts and all(output.prompt_token_ids is not None for output in outputs):
        firsts = outputs[:: len(outputs) // num_prompts]
        num_ids = sum(len(output.prompt_token_ids or ()) for output in firsts)
        _check_count("prompt_tokens", usage.prompt_tokens, num_ids)


def _uneven(output: EngineOutput) -> bool:
    return len(output.completion_token_ids or ()) != len(output.logprobs or ())


def _check_count(name: str, said: int | None, counted: int) -> None:
    if said is not None and said != counted:
        expected = f"usage.{name} equal to the number of ids"
        raise _refusal("statement-contradicted", expected, f"{name} is {said}, the lists have {counted} ids")


def _refusal(code: str, expected: str, found: str) -> ReplyError:
    return ReplyError.of(finding(code, expected=expected, found=found))
