"""What several statements about the same thing agree on, or the refusal that says how they differ.

For engines that repeat ids and logprobs in many places. Findings name the places and count; no id is shown.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rlbatch.catalogue import finding
from rlbatch.engines.request import Prompts
from rlbatch.errors import ReplyError

Item = TypeVar("Item")

_BYTE_SIGNS = ("\ufffd", "<0x")
"""In a string that stands for part of a character, or in a text that such parts do not make whole."""


def refusal(
    code: str, expected: str, found: str, *, likely: str | None = None, fix: str | None = None
) -> ReplyError:
    """The error of one finding."""
    return ReplyError.of(finding(code, expected=expected, found=found, likely=likely, fix=fix))


def sent_prompts(num_choices: int, prompts: Prompts) -> list[Sequence[int] | None]:
    """The request's ids of the prompt of each choice: choice i belongs to prompt i // n.

    Raises:
        ReplyError: statement-contradicted, where the request asked for another number of choices.
    """
    if prompts.token_ids is None:
        return [None] * num_choices
    num_prompts = len(prompts.token_ids)
    each = prompts.num_choices
    if each is None:
        # Where n is unsaid the reply itself says it, if it can be divided among the prompts.
        each = num_choices // num_prompts if num_prompts else 0
    if each * num_prompts != num_choices:
        n = "n unsaid" if prompts.num_choices is None else f"n={prompts.num_choices}"
        raise refusal(
            "statement-contradicted",
            "as many choices as the request asked for",
            f"{num_choices} choices; the request has {num_prompts} prompts, {n}",
        )
    return [ids for ids in prompts.token_ids for _ in range(each)]


def agreed_ids(label: str, said: Mapping[str, Sequence[int | None] | None]) -> list[int] | None:
    """The ids that every place says which says any; None where none does.

    Args:
        label: what findings call the choice.
        said: by place; an entry is None where a row lacks its id.

    Raises:
        ReplyError: length-mismatch, statement-contradicted or ids-missing.

    Example:
        {"token_ids": [5, 7], "logprobs.content": [5, 7], "raw_output": None} -> [5, 7]
    """
    ids = _agreed(label, "ids", said)
    if ids is None:
        return None
    known = [token_id for token_id in ids if token_id is not None]
    if len(known) < len(ids):
        found = f"{label}: ids for {len(known)} of {len(ids)} tokens"
        raise refusal("ids-missing", "the exact ids of the sampled tokens", found)
    return known


def agreed_logprobs(
    label: str, said: Mapping[str, Sequence[float | None] | None]
) -> list[float | None] | None:
    """The logprobs that every place says which says any, nulls kept; None where none does.

    Raises:
        ReplyError: length-mismatch or statement-contradicted.
    """
    return _agreed(label, "logprobs", said)


def check_count(label: str, name: str, said: int | None, counted: int) -> None:
    """Refuse a count that is not the length of what it counts.

    Raises:
        ReplyError: usage-mismatch.
    """
    if said is not None and said != counted:
        raise refusal(
            "usage-mismatch",
            f"{name} equal to the number of ids",
            f"{label}: {name} is {said}, the lists have {counted} ids",
        )


def check_cached(label: str, cached: int | None, num_prompt: int) -> None:
    """Refuse more tokens of the prompt from a cache than the prompt has; which they were is not said.

    Raises:
        ReplyError: statement-contradicted.
    """
    if cached is not None and not 0 <= cached <= num_prompt:
        raise refusal(
            "statement-contradicted",
            f"cached_tokens among the prompt's {num_prompt}",
            f"{label}: cached_tokens is {cached}",
        )


def check_text(label: str, text: str | None, strings: Sequence[str]) -> None:
    """Refuse a text that is not made of the tokens' strings.

    Raises:
        ReplyError: text-mismatch.
    """
    joined = "".join(strings)
    if text and strings and not is_made_of(text, joined):
        found = f"{label}: a text of {len(text)} characters, {len(joined)} in the tokens' strings"
        raise refusal("text-mismatch", "a text that is made of the tokens' strings", found)


def is_made_of(text: str, joined: str) -> bool:
    """Whether every character of the text comes from the tokens' strings, in order.

    Not the other way round: stop strings, special tokens and spaces may be left out of the text. Where
    strings stand for bytes they do not say the text, and nothing is denied.
    """
    if joined.startswith(text) or any(sign in joined + text for sign in _BYTE_SIGNS):
        return True
    rest = iter("".join(joined.split()))
    return all(character in rest for character in "".join(text.split()))


def _agreed(
    label: str, what: str, said: Mapping[str, Sequence[Item | None] | None]
) -> list[Item | None] | None:
    given = {place: list(items) for place, items in said.items() if items is not None and _says(items)}
    if not given:
        return None
    (place, first), *others = given.items()
    for other_place, other in others:
        if len(other) != len(first):
            found = f"{label}: {len(first)} {what} in {place}, {len(other)} in {other_place}"
            raise refusal("length-mismatch", f"as many {what} wherever a reply has them", found)
        differing = [at for at, (a, b) in enumerate(zip(first, other, strict=True)) if a != b]
        if differing:
            found = (
                f"{label}: {place} and {other_place} differ at {len(differing)} of {len(first)}, "
                f"first at token {differing[0]}"
            )
            raise refusal("statement-contradicted", f"the same {what} wherever a reply has them", found)
    return first


def _says(items: Sequence[object]) -> bool:
    """A list whose entries are all null speaks of nothing; an empty one says that there are none."""
    return not items or any(item is not None for item in items)
