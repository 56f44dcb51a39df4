"""What a request to SGLang's /generate says, put into the names that `rlbatch.engines.request` compares.

SGLang's names differ, its meanings do not. Knows nothing of replies; shows no id and no text.
"""

from collections.abc import Mapping, Sequence

from rlbatch.engines.request import Prompts, asked_max_tokens, contradictions, read_prompts
from rlbatch.errors import Finding
from rlbatch.records import Provenance

_RENAMED = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"}
"""SGLang's names for fields of vLLM's."""

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Each puts a grammar over the sampling, where it is set."""


def request_prompts(request: Mapping[str, object] | None) -> Prompts:
    """The prompts of a request: ids where `input_ids` has them, None each where they were text.

    Example:
        {"input_ids": [[1, 5], [1, 6]], "sampling_params": {"n": 2}} -> two prompts, num_choices 2
    """
    if request is None:
        return Prompts()
    return read_prompts(_as_completions(request, _each_sampling(request)[0]), "completions")


def request_contradictions(request: Mapping[str, object] | None, provenance: Provenance) -> list[Finding]:
    """Every statement of the request that the provenance denies."""
    if request is None:
        return []
    found: list[Finding] = []
    for sampling in _each_sampling(request):
        found += contradictions(_as_completions(request, sampling), "completions", provenance)
    return found


def request_max_tokens(request: Mapping[str, object] | None, num_choices: int) -> list[int | None]:
    """The most tokens that each choice was to have; None where the request does not say.

    Example:
        two prompts with max_new_tokens 8 and 4, four choices -> [8, 8, 4, 4]
    """
    if request is None:
        return [None] * num_choices
    said = [
        asked_max_tokens(_as_completions(request, each), "completions") for each in _each_sampling(request)
    ]
    if num_choices % len(said):
        # Other parameters than prompts: which are of which is unknown.
        return [None] * num_choices
    return [limit for limit in said for _ in range(num_choices // len(said))]


def sampling_fields(request: Mapping[str, object]) -> Mapping[str, object] | None:
    """How the request draws tokens, under vLLM's names; None where each prompt has parameters of its own.

    Example:
        {"sampling_params": {"temperature": 0.7, "min_new_tokens": 2}} -> temperature 0.7, min_tokens 2
    """
    sampling = request.get("sampling_params")
    if sampling is not None and not isinstance(sampling, Mapping):
        return None
    return _as_completions(request, sampling or {})


def _each_sampling(request: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    """The sampling parameters: one object for all prompts, or a list with one for each."""
    sampling = request.get("sampling_params")
    if isinstance(sampling, Mapping):
        return [sampling]
    if isinstance(sampling, list) and sampling and all(isinstance(each, Mapping) for each in sampling):
        return sampling
    return [{}]


def _as_completions(request: Mapping[str, object], sampling: Mapping[str, object]) -> dict[str, object]:
    renamed = {_RENAMED.get(name, name): value for name, value in sampling.items()}
    grammar = next((sampling[name] for name in _GRAMMARS if sampling.get(name)), None)
    ids = request.get("input_ids")
    return renamed | {"prompt": request.get("text") if ids is None else ids, "structured_outputs": grammar}
