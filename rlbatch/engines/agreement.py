"""What several statements about the same thing agree on, or the refusal that says how they differ.

For engines that repeat ids and logprobs in many places. Findings name the places and count; no id is shown.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from rlbatch.engines.refusals import refusal
from rlbatch.engines.request import Prompts

MAX_INDICES_SHOWN = 8


class Indexed(Protocol):
    """A choice of any engine."""

    @property
    def index(self) -> int:
        """Its place among the choices."""


Item = TypeVar("Item")

IndexedChoice = TypeVar("IndexedChoice", bound=Indexed)

_BYTE_SIGNS = ("\ufffd", "<0x")
"""In a string that stands for part of a character, or in a text that such parts do not make whole."""


def in_order(choices: Sequence[IndexedChoice]) -> list[IndexedChoice]:
    """The choices by their index, which runs from 0 without a gap.

    Raises:
        ReplyError: reply-malformed.
    """
    ordered = sorted(choices, key=lambda choice: choice.index)
    if not ordered:
        raise refusal("reply-malformed", "at least one choice", "an empty list of choices")
    if [choice.index for choice in ordered] != list(range(len(ordered))):
        shown = ", ".join(str(choice.index) for choice in ordered[:MAX_INDICES_SHOWN])
        raise refusal("reply-malformed", f"choices 0 to {len(ordered) - 1}, each once", f"indices {shown}")
    return ordered


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
