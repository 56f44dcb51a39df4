"""What a request says: the prompt's ids, the number of choices, and how the tokens were to be drawn.

Everything that is said twice must agree: the request's sampling fields with the provenance, its prompt with
the reply's. A field that is absent or null says nothing, because a server's defaults are not the protocol's.
Knows the field names of vLLM's three routes; nothing of replies. Findings show no id and no text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeGuard

import msgspec

from rlbatch.catalogue import finding
from rlbatch.engines.body import TokenId
from rlbatch.engines.sampling_fields import FLAGS, NUMBERS, as_off, asks_for_grammar
from rlbatch.errors import Finding, RecordError
from rlbatch.records import Provenance

Route: TypeAlias = Literal["completions", "chat", "generate"]

PROMPT_FIELDS: Mapping[Route, str] = {"completions": "prompt", "chat": "messages", "generate": "token_ids"}
"""Where a request of each route has its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts of one request; all None where there is no request, or it does not say."""

    token_ids: Sequence[Sequence[int] | None] | None = None
    """One entry a prompt; an entry is None where that prompt was text."""
    num_choices: int | None = None
    """Choices a prompt (n)."""

    @property
    def count(self) -> int | None:
        """Number of prompts."""
        return None if self.token_ids is None else len(self.token_ids)


def read_prompts(request: Mapping[str, object] | None, route: Route) -> Prompts:
    """The prompts of a request of this route; ids only where they were sent as integers.

    Raises:
        RecordError: the prompt is in no form that a request has, such as an array.

    Example:
        {"prompt": [[1, 5], [1, 6]], "n": 2} -> token_ids [[1, 5], [1, 6]], num_choices 2
    """
    if request is None:
        return Prompts()
    n = _sampling_fields(request, route).get("n")
    return Prompts(
        token_ids=_prompt_token_ids(request.get(PROMPT_FIELDS[route]), route),
        num_choices=n if _is_int(n) else None,
    )


def contradictions(
    request: Mapping[str, object] | None, route: Route, provenance: Provenance
) -> list[Finding]:
    """Every statement of the request that the provenance, or the reply's route, denies."""
    if request is None:
        return []
    fields = _sampling_fields(request, route)
    found = [_route_contradiction(request, route)]
    found += [_number_contradiction(fields, name, provenance) for name in NUMBERS]
    found += [_flag_contradiction(fields, name, provenance) for name in FLAGS]
    if asks_for_grammar(fields) and not provenance.sampling.structured_output:
        stated = "the provenance says structured_output=False"
        found.append(_contradiction("structured output", "asked for a grammar", stated))
    if fields.get("use_beam_search"):
        stated = "a provenance is of tokens drawn one by one"
        found.append(_contradiction("use_beam_search", "set use_beam_search", stated))
    return [each for each in found if each is not None]


def asks_for(request: Mapping[str, object] | None, name: str) -> bool:
    """Whether the request set this switch, e.g. `echo` or `stream`."""
    return request is not None and bool(request.get(name))


def asked_number(request: Mapping[str, object] | None, name: str) -> int | None:
    """The whole number that the request gives here, e.g. for `logprobs`; None where it gives none."""
    value = None if request is None else request.get(name)
    return value if _is_int(value) else None


def asked_max_tokens(request: Mapping[str, object] | None, route: Route) -> int | None:
    """The most tokens a choice that the request asked for; None where it does not say.

    Example:
        {"messages": [...], "max_tokens": 8, "max_completion_tokens": 4} -> 4
    """
    fields = None if request is None else _sampling_fields(request, route)
    newer = asked_number(fields, "max_completion_tokens") if route == "chat" else None
    return asked_number(fields, "max_tokens") if newer is None else newer


def routing_request(request: Mapping[str, object] | None, route: Route) -> Mapping[str, object] | None:
    """The fields among which `routed_experts_prompt_start` is, where a request is at hand."""
    return None if request is None else _sampling_fields(request, route)


def _sampling_fields(request: Mapping[str, object], route: Route) -> Mapping[str, object]:
    # The generate route reads `sampling_params` only, the others the top level only; vLLM ignores the rest.
    if route != "generate":
        return request
    nested = request.get("sampling_params")
    return nested if isinstance(nested, Mapping) else {}


def _prompt_token_ids(prompt: object, route: Route) -> Sequence[Sequence[int] | None] | None:
    if prompt is None:
        return None
    if route == "chat":
        # A template makes the ids of messages; a chat request never has them.
        return [None]
    if (
        route == "completions"
        and isinstance(prompt, (list, tuple))
        and all(isinstance(item, (str, list, tuple)) for item in prompt)
    ):
        return [_ids(item, route) for item in prompt]
    return [_ids(prompt, route)]


def _ids(prompt: object, route: Route) -> list[int] | None:
    """The ids of one prompt; None where it is text, or empty."""
    if isinstance(prompt, str) and route == "completions":
        return None
    if isinstance(prompt, (list, tuple)):
        try:
            return msgspec.convert(prompt, list[TokenId]) or None
        except msgspec.ValidationError:
            # Told below with what is no prompt at all.
            pass
    forms = "text, ids, or a list of these" if route == "completions" else "ids"
    raise RecordError(
        f"request: expected the prompt as it was sent: {forms}, where ids are a list of ints from 0 to "
        f"{2**31 - 1}; found {_kind(prompt)}; of an array send and pass what .tolist() makes of it"
    )


def _kind(value: object) -> str:
    if not isinstance(value, (list, tuple)):
        return type(value).__name__
    kinds = sorted({type(item).__name__ for item in value})
    return f"a {type(value).__name__} of {', '.join(kinds)}"


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _route_contradiction(request: Mapping[str, object], route: Route) -> Finding | None:
    if PROMPT_FIELDS[route] in request:
        return None
    others = [field for field in PROMPT_FIELDS.values() if request.get(field) is not None]
    return _contradiction("the route", f"has `{others[0]}`", f"the reply is of {route}") if others else None


def _number_contradiction(fields: Mapping[str, object], name: str, provenance: Provenance) -> Finding | None:
    value = fields.get(name)
    if value is None:
        return None
    sent = as_off(name, value)
    stated = getattr(provenance.sampling, name)
    if isinstance(sent, (int, float)) and not isinstance(sent, bool) and sent == stated:
        return None
    shown = f"{name}={value}" if isinstance(value, (int, float)) else f"a {type(value).__name__} for {name}"
    return _contradiction(name, f"sent {shown}", f"the provenance says {name}={stated}")


def _flag_contradiction(fields: Mapping[str, object], name: str, provenance: Provenance) -> Finding | None:
    value = fields.get(name)
    stated: bool = getattr(provenance.sampling, name)
    if value is None or bool(value) == stated:
        return None
    return _contradiction(
        name, f"set {name}" if value else f"left {name} empty", f"the provenance says {name}={stated}"
    )


def _contradiction(what: str, request_did: str, stated: str) -> Finding:
    return finding(
        "statement-contradicted",
        expected=f"request, reply and provenance that agree on {what}",
        found=f"the request {request_did}; {stated}",
    )
