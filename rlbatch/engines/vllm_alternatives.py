"""`top_logprobs`: a sampled token, which is always among its own alternatives, has one logprob and not two.

    completions      [{" Chen": -2.5, " The": -1.0}, ...]       by text, or by `token_id:572`
    chat, generate   content[].top_logprobs, with a text or an id each

Texts may fall together: two tokens of one text have one key, and the later one's logprob. What that explains
is no contradiction. Alternatives that were not drawn are not judged: -9999.0 is legal there. Keeps nothing.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from rlbatch.engines.refusals import refusal
from rlbatch.engines.vllm_reply import TOKEN_ID_PREFIX, Choice, Entry, Logprobs, TopLogprobs
from rlbatch.errors import ReplyError

MAX_FLOAT32 = 3.4028234663852886e38

PIECE_BYTES = 1 << 14
"""Alternatives are decoded this much at a time: all at once they take three times the rest of a reply."""

_CUT = b'},{"'
"""Between two alternatives. Inside a string these signs end it, and the piece before them is no JSON."""

_DECODER = msgspec.json.Decoder(TopLogprobs)

Alternatives: TypeAlias = dict[str, float | None] | None
"""Those of one token; null where it has no logprob."""


def check_alternatives(choice: Choice, *, num_asked: int | None) -> None:
    """Refuse a choice whose alternatives give a sampled token another logprob, or do not have it.

    Args:
        choice: its lists may be of prompt and completion, where the prompt was echoed.
        num_asked: alternatives a token that the request asked for; None where it does not say.

    Raises:
        ReplyError: statement-contradicted, length-mismatch or reply-malformed.
    """
    logprobs = choice.logprobs
    if logprobs is None:
        return
    for at, entry in enumerate(logprobs.content or ()):
        if entry.top_logprobs and not _agrees(entry):
            raise _contradiction(choice.label, at)
    values, tokens = logprobs.token_logprobs or [], logprobs.tokens
    at, any_said = 0, False
    for said in _pieces(choice.label, logprobs):
        any_said = True
        stop = at + len(said)
        if tokens is not None and stop <= len(values):
            check_drawn(choice.label, said, tokens[at:stop], values[at:stop], num_asked=num_asked, first=at)
        at = stop
    if any_said and at != len(values):
        found = f"{choice.label}: {len(values)} logprobs beside {at} alternatives"
        raise refusal("length-mismatch", "alternatives for each of the reply's logprobs", found)


def check_drawn(
    label: str,
    said: Sequence[Alternatives],
    tokens: Sequence[str],
    values: Sequence[float | None],
    *,
    num_asked: int | None,
    first: int = 0,
) -> None:
    """The same for lists of equal length, token by token.

    Args:
        label: what findings call the choice.
        said: completions' `top_logprobs`.
        tokens: the drawn tokens' strings.
        values: their logprobs, nats.
        num_asked: as above.
        first: the place of the first of these in the choice.

    Raises:
        ReplyError: statement-contradicted.

    Example:
        said [{" a": -1.5}], tokens [" a"], values [-1.5] -> agreed; values [-1.25] -> refused
    """
    if all_agree(said, tokens, values):
        return
    for at, (alternatives, token, value) in enumerate(zip(said, tokens, values, strict=True), first):
        if value is None:
            # Refused by `to_turn`, unless it is the first of an echo.
            continue
        if alternatives is not None:
            own = alternatives.get(token)
            if own == value or _explained(token, own, value, len(alternatives), num_asked):
                continue
        raise _contradiction(label, at)


def all_agree(said: Sequence[Alternatives], tokens: Sequence[str], values: Sequence[float | None]) -> bool:
    """Whether each token's own logprob is there, which is as it should be: the fastest way to tell.

    Lists are of equal length. False proves nothing: `check_drawn` judges what is not so plain.
    """
    try:
        return list(map(dict.get, said, tokens)) == values  # type: ignore[arg-type]
    except TypeError:
        # A null has no `get` to ask.
        return False


def _explained(token: str, own: float | None, value: float, num_keys: int, num_asked: int | None) -> bool:
    """Whether another token of the same text can have put its logprob in the place of the drawn one's.

    With k asked for a reply has the k best and, where it is not one of them, the drawn token: k + 1 keys are
    of as many tokens. k keys may be of k + 1, if the drawn token is not one of the best.
    """
    if not -MAX_FLOAT32 <= value <= MAX_FLOAT32:
        # `to_turn` names these.
        return True
    if own is None or token.startswith(TOKEN_ID_PREFIX):
        return False
    if num_asked is None or num_keys < num_asked:
        return True
    return num_keys == num_asked and own > value


def _pieces(label: str, logprobs: Logprobs) -> Iterator[TopLogprobs]:
    """Completions' alternatives in order, some at a time; none where the reply has none."""
    said = logprobs.top_logprobs
    if not isinstance(said, msgspec.Raw):
        if said is not None:
            yield said
        return
    text = bytes(said)
    if text in (b"", b"null"):
        return
    start = 1
    try:
        while (end := text.find(_CUT, start + PIECE_BYTES)) >= 0:
            try:
                piece = _DECODER.decode(b"[" + text[start : end + 1] + b"]")
            except msgspec.ValidationError:
                raise
            except msgspec.DecodeError:
                # Cut inside a token's string: the rest comes in one piece.
                break
            yield piece
            start = end + 2
        yield _DECODER.decode(b"[" + text[start:])
    except msgspec.DecodeError as error:
        found = f"{label}, top_logprobs: {error}"
        raise refusal("reply-malformed", "a list of alternatives by text", found) from None


def _agrees(entry: Entry) -> bool:
    if entry.logprob is None or not -MAX_FLOAT32 <= entry.logprob <= MAX_FLOAT32:
        # `to_turn` names these.
        return True
    # Different tokens may share a text, in which case one of them is the sampled one.
    same = [
        other.logprob
        for other in entry.top_logprobs or ()
        if other.token_id == entry.token_id and other.token == entry.token
    ]
    return not same or entry.logprob in same


def _contradiction(label: str, at: int) -> ReplyError:
    found = f"{label}: it differs, or is not there, at sampled token {at}"
    return refusal("statement-contradicted", "the same logprob in top_logprobs", found)
