"""vLLM in process: the output objects of `LLM.generate` and the async engine, read as a body of generate.

Objects are known by their attributes, so vllm is never imported. An entry of `logprobs` maps ids to objects
with a `logprob`; the sampled id must be among them. Knows nothing of requests.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import msgspec

from rlbatch.engines.body import TokenId
from rlbatch.engines.parts import Span
from rlbatch.engines.refusals import refusal
from rlbatch.engines.vllm_reply import Body, Choice, Entry, Logprobs, PromptLogprobs, Ranked
from rlbatch.errors import ReplyError

SUM_TOLERANCE = 1e-6
"""Relative to the sum: the engine adds the same doubles, but need not do so in our order."""


class RequestOutput(Protocol):
    """What is read of the object."""

    @property
    def request_id(self) -> str:
        """The engine's."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """[P]."""

    @property
    def outputs(self) -> Sequence[Any]:
        """Objects with index, token_ids, logprobs, finish_reason, and more that may be absent."""


def is_request_output(payload: object) -> TypeGuard[RequestOutput]:
    """Whether a payload is such an object."""
    return hasattr(payload, "outputs") and hasattr(payload, "prompt_token_ids")


def body_of(output: RequestOutput) -> Body:
    """The object as a decoded body; nothing of it is changed or kept.

    Raises:
        ReplyError: reply-malformed, a field of another type; route-unsupported, an output that is not
            finished; statement-contradicted, a `cumulative_logprob` that is not the sum.
    """
    try:
        return Body(
            request_id=msgspec.convert(output.request_id, str | None),
            prompt_token_ids=_ids(output.prompt_token_ids),
            prompt_logprobs=_prompt_logprobs(getattr(output, "prompt_logprobs", None)),
            choices=[_choice(each) for each in output.outputs],
        )
    except msgspec.ValidationError as error:
        raise _malformed(str(error)) from None
    except (AttributeError, TypeError) as error:
        raise _malformed(f"an object of another shape ({type(error).__name__})") from None


def _choice(each: Any) -> Choice:  # noqa: ANN401
    finish_reason = msgspec.convert(each.finish_reason, str | None)
    index = msgspec.convert(each.index, int)
    if finish_reason is None:
        raise refusal(
            "route-unsupported",
            "an output that is finished",
            f"choice {index} has no finish_reason",
            likely="an output of a streaming generator that is not its last",
            fix="pass the last output, whose lists are whole (output_kind FINAL_ONLY or CUMULATIVE)",
        )
    ids = _ids(each.token_ids)
    entries = _entries(ids or [], each.logprobs, label=f"choice {index}")
    _check_sum(getattr(each, "cumulative_logprob", None), entries, label=f"choice {index}")
    return Choice(
        index=index,
        token_ids=ids,
        logprobs=None if entries is None else Logprobs(content=entries),
        finish_reason=finish_reason,
        stop_reason=msgspec.convert(getattr(each, "stop_reason", None), int | str | None),
        text=msgspec.convert(getattr(each, "text", None), str | None),
        weight_versions=_spans(getattr(each, "weight_versions", None)),
        routed_experts=getattr(each, "routed_experts", None),
    )


def _ids(ids: Sequence[int] | None) -> list[int] | None:
    return None if ids is None else msgspec.convert(list(ids), list[TokenId])


def _entries(ids: Sequence[int], entries: Sequence[Any] | None, *, label: str) -> list[Entry] | None:
    """[C] entries; one without the sampled id has no logprob, and `to_turn` refuses it."""
    if entries is None:
        return None
    own: list[Entry] = []
    for at, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise _malformed(f"{label}: logprobs[{at}] is no mapping of ids")
        # More entries than ids are for `to_turn` to count.
        value = entry.get(ids[at]) if at < len(ids) else None
        own.append(Entry(logprob=_number(value)))
    return own


def _number(value: object) -> float | None:
    number = getattr(value, "logprob", value)
    return msgspec.convert(number, float | None)


def _prompt_logprobs(entries: Sequence[Any] | None) -> PromptLogprobs | None:
    if entries is None:
        return None
    return [
        None if entry is None else {str(key): Ranked(logprob=_number(value)) for key, value in entry.items()}
        for entry in entries
    ]


def _spans(spans: Sequence[Any] | None) -> list[Span] | None:
    return None if spans is None else msgspec.convert(list(spans), list[Span], from_attributes=True)


def _check_sum(said: object, entries: Sequence[Entry] | None, *, label: str) -> None:
    values = [entry.logprob for entry in entries or ()]
    if said is None or not values or None in values:
        return
    total = sum(value for value in values if value is not None)
    if not math.isfinite(total):
        # For `to_turn`, which says which.
        return
    if not math.isclose(msgspec.convert(said, float), total, rel_tol=SUM_TOLERANCE, abs_tol=SUM_TOLERANCE):
        found = f"{label}: cumulative_logprob is not the sum of {len(values)} logprobs"
        raise refusal("statement-contradicted", "cumulative_logprob equal to the sum", found)


def _malformed(found: str) -> ReplyError:
    return refusal("reply-malformed", "vLLM's RequestOutput", found)
