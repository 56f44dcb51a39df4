"""What a request to Fireworks' completions says, put into the names that `rlbatch.engines.request` compares.

Knows nothing of replies; shows no id and no text.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlbatch.catalogue import finding
from rlbatch.engines.request import Prompts, Route, asked_max_tokens, contradictions, read_prompts
from rlbatch.errors import Finding
from rlbatch.records import Provenance

_UNSTATED = ("mirostat_target", "mirostat_lr", "typical_p")
"""Ways of sampling that `SamplingParams` cannot state."""


@dataclass(frozen=True, slots=True)
class Echo:
    """Whether the reply repeats the prompt before the completion."""

    asked: bool
    last: int | None = None
    """Only so many tokens of the prompt's end; None is all of it."""


def echo_of(request: Mapping[str, object] | None) -> Echo:
    """The request's `echo` and `echo_last`.

    Example:
        {"echo": True, "echo_last": 2} -> Echo(asked=True, last=2)
    """
    if request is None:
        return Echo(asked=False)
    last = request.get("echo_last")
    known = last if isinstance(last, int) and not isinstance(last, bool) and last > 0 else None
    return Echo(asked=bool(request.get("echo")) or known is not None, last=known)


def request_prompts(request: Mapping[str, object] | None) -> Prompts:
    """The prompts of a request: ids where they were sent as integers."""
    return Prompts() if request is None else read_prompts(request, _route_of(request))


def request_max_tokens(request: Mapping[str, object] | None) -> int | None:
    """The most tokens a choice that the request asked for; None where it does not say."""
    return None if request is None else asked_max_tokens(request, _route_of(request))


def request_contradictions(request: Mapping[str, object] | None, provenance: Provenance) -> list[Finding]:
    """Every statement of the request that the provenance denies, or cannot make."""
    if request is None:
        return []
    found = contradictions(sampling_fields(request), _route_of(request), provenance)
    for name in _UNSTATED:
        if request.get(name) is not None:
            found.append(
                finding(
                    "statement-contradicted",
                    expected="a request whose sampling a provenance can state",
                    found=f"the request set {name}",
                )
            )
    return found


def sampling_fields(request: Mapping[str, object]) -> Mapping[str, object]:
    """The request, with its grammar under a name of vLLM's.

    Example:
        {"response_format": {"type": "grammar", ...}} -> the same with structured_outputs True
    """
    response_format = request.get("response_format")
    if isinstance(response_format, Mapping) and response_format.get("type") == "grammar":
        return {**request, "structured_outputs": True}
    return request


def _route_of(request: Mapping[str, object]) -> Route:
    return "chat" if "messages" in request else "completions"
