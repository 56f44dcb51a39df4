"""What recordings and requests say of how their tokens were drawn: `SamplingParams`, field by field.

Knows the field names of vLLM's requests; nothing of flags, ids or logprobs.
"""

from collections.abc import Mapping
from dataclasses import fields

from rlbatch.catalogue import finding
from rlbatch.engines.sampling_fields import FLAGS, GRAMMARS, as_off, asks_for_grammar
from rlbatch.errors import Finding, ReplyError, Where
from rlbatch.records import SamplingParams

SAMPLING_FIELDS: tuple[str, ...] = tuple(spec.name for spec in fields(SamplingParams))

SERVER_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a server takes from the model's generation_config where a request is silent, and no reply tells."""

NOT_SHAPING = (
    "ignore_eos",
    "include_stop_str_in_output",
    "max_tokens",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
)
"""Sampling fields that choose how many tokens are drawn, never from which distribution."""

OWN_STOPS = ("stop", "stop_token_ids")
"""Those that end a completion at something else than the model's EOS."""

NEUTRAL = SamplingParams(temperature=1.0)
"""Nothing in force."""
_WHOLE_NUMBERS = ("top_k", "min_tokens")


def sampling_of_recording(sampling: Mapping[str, object], where: Where) -> dict[str, object]:
    """All fields of `SamplingParams` by a recording's `sampling`: what it leaves out was sent as neutral.

    Raises:
        ReplyError: a key that nobody knows, so that its effect on the distribution is unknown; a bad value.
    """
    known = (*SAMPLING_FIELDS, *NOT_SHAPING, *GRAMMARS, "response_format", "tool_choice")
    unknown = [name for name in sampling if name not in known]
    if unknown:
        raise ReplyError.of(
            finding(
                "provenance-missing",
                where=where,
                expected="`sampling` with fields whose effect is known",
                found=f"`{unknown[0]}`" + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""),
                likely="a misspelt field, or one that this release does not know",
                fix="correct its name in the file, or leave the recording out",
            )
        )
    neutral = {name: getattr(NEUTRAL, name) for name in SAMPLING_FIELDS}
    return neutral | _said(sampling, where)


def sampling_of_request(request: Mapping[str, object], where: Where) -> dict[str, object]:
    """Fields of `SamplingParams` by a request; where it is silent, those that a server may set are left out.

    Raises:
        ReplyError: a bad value.
    """
    neutral = {name: getattr(NEUTRAL, name) for name in SAMPLING_FIELDS if name not in SERVER_DEFAULTS}
    return neutral | _said(request, where)


def _said(sampling: Mapping[str, object], where: Where) -> dict[str, object]:
    """The fields of `SamplingParams` that vLLM's sampling fields state; null states nothing."""
    said = {
        name: bool(sampling[name]) if name in FLAGS else _number(name, sampling[name], where)
        for name in SAMPLING_FIELDS
        if name != "structured_output" and sampling.get(name) is not None
    }
    if sampling.get("structured_output") or asks_for_grammar(sampling):
        said["structured_output"] = True
    return said


def _number(name: str, value: object, where: Where) -> object:
    whole = name in _WHOLE_NUMBERS
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "a whole number" if whole else "a number"
        raise ReplyError.of(bad_value(f"{name}: expected {kind}, found {type(value).__name__}", where))
    return as_off(name, value if whole else float(value))


def bad_value(complaint: str, where: Where) -> Finding:
    """That no engine takes such sampling parameters."""
    return finding(
        "reply-malformed",
        where=where,
        expected="sampling parameters that an engine takes",
        found=complaint,
        likely="a slip in a flag, or in the recording",
        fix="correct the value",
    )
