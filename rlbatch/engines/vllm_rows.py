"""The ids and logprobs of one vLLM choice, out of whatever the reply says of them, twice or once.

    token_ids null, tokens `token_id:572`     the ids are read from the strings
    echo, P + C rows, row 0 null              the last C rows are the completion's, the others the prompt's
    echo with max_tokens 0, P rows            no token was asked for; the one id that vLLM adds has neither
                                              logprob nor text and is not taken
    prompt_logprobs, top_logprobs             not kept; what they say of the prompt and of sampled tokens must
                                              agree with the rest
    text                                      must be made of the tokens' strings, where those are text

What is said twice must agree; lengths are left to `to_turn`, which has more to say. Knows nothing of requests
but three of their fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlbatch.engines.agreement import check_text
from rlbatch.engines.parts import text_of
from rlbatch.engines.refusals import refusal
from rlbatch.engines.request import Route, asked_number, asks_for
from rlbatch.engines.vllm_alternatives import check_alternatives
from rlbatch.engines.vllm_reply import (
    TOKEN_ID_PREFIX,
    Choice,
    PromptLogprobs,
    logprobs_of,
    spelt_ids_of,
)
from rlbatch.errors import ReplyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What is of the completion alone."""

    token_ids: Sequence[int]
    logprobs: Sequence[float | None] | None
    echoed: bool
    """The reply had the prompt's logprobs too."""
    num_unasked: int = 0
    """Ids that the reply has and the request did not ask for."""


def rows_of(
    choice: Choice,
    route: Route,
    *,
    prompt_ids: Sequence[int] | None,
    prompt_logprobs: PromptLogprobs | None,
    request: Mapping[str, object] | None,
) -> Rows:
    """The completion's ids and logprobs, once every statement of the choice has been compared.

    Raises:
        ReplyError: ids-missing, statement-contradicted, length-mismatch or reply-malformed.
    """
    _check_place(choice, route)
    values = logprobs_of(choice.logprobs, route)
    num_rows = len(values or ())
    spelt = spelt_ids_of(choice.logprobs)
    num_echoed = _num_echoed(choice, route, values, prompt_ids, request)
    if num_echoed and values is not None and prompt_ids is not None:
        _check_echo(choice, values[:num_echoed], spelt[:num_echoed], prompt_ids)
        _check_prompt_logprobs(choice, prompt_logprobs, prompt_ids, request, echoed=values[:num_echoed])
        values = values[num_echoed:]
        spelt = spelt[num_echoed:]
    else:
        _check_prompt_logprobs(choice, prompt_logprobs, prompt_ids, request, echoed=None)
    ids = _ids(choice, spelt)
    unasked = num_echoed > 0 and not values and len(ids) == 1 and _asked_for_none(request)
    if unasked or len(values or ()) == len(ids):
        # Where ids and logprobs are unequal, `to_turn` has more to say.
        _check_num_tokens(choice, num_rows)
        if not num_echoed:
            _check_text(choice)
        check_alternatives(choice, num_asked=asked_number(request, "logprobs"))
    if unasked:
        return Rows(token_ids=[], logprobs=[], echoed=True, num_unasked=1)
    return Rows(token_ids=ids, logprobs=values, echoed=num_echoed > 0)


def _check_place(choice: Choice, route: Route) -> None:
    logprobs = choice.logprobs
    if logprobs is None:
        return
    if route != "completions" and (logprobs.token_logprobs is not None or logprobs.tokens is not None):
        place, wanted = "logprobs.token_logprobs or .tokens", "logprobs.content"
    elif route == "completions" and logprobs.content is not None:
        place, wanted = "logprobs.content", "logprobs.token_logprobs"
    else:
        return
    found = f"{choice.label}: {place}, where other engines have them"
    raise refusal("reply-malformed", f"vLLM's {wanted} in a reply of {route}", found)


def _check_num_tokens(choice: Choice, num_rows: int) -> None:
    tokens = choice.logprobs.tokens if choice.logprobs is not None else None
    if tokens is not None and len(tokens) != num_rows:
        found = f"{choice.label}: {num_rows} logprobs beside {len(tokens)} tokens"
        raise refusal("length-mismatch", "a logprob for each of the reply's tokens", found)


def _num_echoed(
    choice: Choice,
    route: Route,
    values: Sequence[float | None] | None,
    prompt_ids: Sequence[int] | None,
    request: Mapping[str, object] | None,
) -> int:
    """Rows of the prompt in front of the completion's: P where it was echoed, else 0."""
    asked = asks_for(request, "echo")
    if route != "completions" or not values or prompt_ids is None:
        return 0
    num_rows, num_prompt = len(values), len(prompt_ids)
    num_ids = None if choice.token_ids is None else len(choice.token_ids)
    whole = num_ids is not None and num_rows == num_prompt + num_ids
    if not asked:
        denied = request is not None and request.get("echo") is False
        # Without the request's word, the null in front and the exact count say it.
        return num_prompt if whole and values[0] is None and not denied else 0
    unasked = num_rows == num_prompt and num_ids == 1 and _asked_for_none(request)
    if (whole or unasked or (num_ids is None and num_rows >= num_prompt)) and values[0] is None:
        return num_prompt
    found = f"{choice.label}: {num_rows} logprobs for {num_prompt} + {num_ids} ids"
    if values[0] is not None:
        found += "; the first is not null"
    raise refusal("length-mismatch", "a null, then logprobs of prompt and completion, as echoed", found)


def _asked_for_none(request: Mapping[str, object] | None) -> bool:
    return asked_number(request, "max_tokens") == 0


def _check_echo(
    choice: Choice,
    values: Sequence[float | None],
    spelt: Sequence[int | None],
    prompt_ids: Sequence[int],
) -> None:
    nulls = sum(value is None for value in values[1:])
    if nulls:
        raise refusal(
            "logprob-missing", "a logprob for each echoed token after the first", f"{nulls} are null"
        )
    if spelt and list(spelt) != list(prompt_ids):
        raise _disagreement(choice, "echoed", spelt, prompt_ids)


def _check_prompt_logprobs(
    choice: Choice,
    entries: PromptLogprobs | None,
    prompt_ids: Sequence[int] | None,
    request: Mapping[str, object] | None,
    *,
    echoed: Sequence[float | None] | None,
) -> None:
    if entries is None or prompt_ids is None or _starts_late(request):
        return
    if len(entries) != len(prompt_ids) or (entries and entries[0] is not None):
        found = f"{choice.label}: {len(entries)} entries for {len(prompt_ids)} ids"
        raise refusal("length-mismatch", "prompt_logprobs with a null, then an entry for each id", found)
    for at in range(1, len(entries)):
        own = (entries[at] or {}).get(str(prompt_ids[at]))
        if own is None or (echoed is not None and own.logprob != echoed[at]):
            said = "has not the prompt's id" if own is None else "has another logprob than the echo"
            found = f"{choice.label}: entry {at} {said}"
            raise refusal("statement-contradicted", "prompt_logprobs of the prompt's own ids", found)


def _starts_late(request: Mapping[str, object] | None) -> bool:
    """Entries of the last tokens only were asked for: not read here."""
    nested = (request or {}).get("sampling_params")
    return isinstance(nested, Mapping) and bool(nested.get("prompt_logprob_start"))


def _ids(choice: Choice, spelt: Sequence[int | None]) -> Sequence[int]:
    whole = [each for each in spelt if each is not None and each >= 0]
    if choice.token_ids is None:
        if spelt and len(whole) == len(spelt):
            return whole
        hint = "; the strings of its tokens spell some ids, but not all" if whole else ""
        found = f"{choice.label}: `token_ids` is null or absent{hint}"
        raise refusal("ids-missing", "the exact ids of the sampled tokens", found)
    # Unequal lengths are for `to_turn` to say.
    if spelt and len(spelt) == len(choice.token_ids) and list(spelt) != choice.token_ids:
        raise _disagreement(choice, "sampled", spelt, choice.token_ids)
    return choice.token_ids


def _check_text(choice: Choice) -> None:
    """The tokens' strings make the text; strings that spell ids do not say it."""
    logprobs, text = choice.logprobs, text_of(choice.text, choice.message)
    if logprobs is None or not text:
        return
    strings = logprobs.tokens or [entry.token for entry in logprobs.content or () if entry.token is not None]
    if not strings or not strings[0].startswith(TOKEN_ID_PREFIX):
        check_text(choice.label, text, strings)


def _disagreement(choice: Choice, kind: str, spelt: Sequence[int | None], ids: Sequence[int]) -> ReplyError:
    differing = [at for at, (a, b) in enumerate(zip(ids, spelt, strict=False)) if a != b]
    return refusal(
        "statement-contradicted",
        "the ids beside the logprobs equal to " + ("token_ids" if kind == "sampled" else "the prompt's"),
        f"{choice.label}: {len(differing)} of {len(spelt)} differ, first at {kind} token {differing[0]}",
    )
