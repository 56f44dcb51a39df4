"""The names by which vLLM's requests say how tokens are drawn, and what their values mean here.

One list for everyone who reads a request or a recording. Knows nothing of routes or replies.
"""

from collections.abc import Mapping

NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
"""Fields whose value is in `SamplingParams` under the same name."""

FLAGS = ("logit_bias", "allowed_token_ids", "bad_words")
"""Fields whose presence alone is in `SamplingParams`: an empty value means off."""

GRAMMARS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding",
)
"""Fields that put a grammar over the sampling, where they are set."""

_GRAMMAR_FORMATS = ("json_object", "json_schema", "structural_tag")
"""Types of `response_format` that do so too."""


def as_off(name: str, value: object) -> object:
    """The value as `SamplingParams` has it: vLLM takes -1 as well as 0 for a top_k that is off."""
    return 0 if name == "top_k" and value == -1 else value


def asks_for_grammar(sampling: Mapping[str, object]) -> bool:
    """Whether a request's fields put a grammar over the sampling."""
    if any(sampling.get(name) for name in GRAMMARS):
        return True
    response_format = sampling.get("response_format")
    if isinstance(response_format, Mapping) and response_format.get("type") in _GRAMMAR_FORMATS:
        return True
    choice = sampling.get("tool_choice")
    return choice == "required" or isinstance(choice, Mapping)
