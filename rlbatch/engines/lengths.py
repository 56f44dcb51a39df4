"""What a difference between the number of logprobs and the number of ids comes from, where counts tell it."""

from collections.abc import Sequence
from itertools import groupby

MIN_PLACEHOLDERS = 4
"""Equal ids in a row of a prompt that are taken for the places of an image."""


def why_unequal(
    prompt: Sequence[int],
    ids: Sequence[int],
    values: Sequence[float | None],
    *,
    stop_ids: Sequence[int],
    stopped: bool,
) -> str | None:
    """What the difference equals: nulls, stop tokens or the places of an image; None where nothing fits.

    Args:
        prompt: [P] ids.
        ids: [C] sampled ids.
        values: logprobs of another number.
        stop_ids: those that end a turn; empty where nobody knows.
        stopped: whether the engine says that one did.

    Example:
        ids [5, 7], values [-0.5, -1.0, -0.1], stop_ids (2, 11), stopped: a stop token (2 or 11) is missing
    """
    difference = len(values) - len(ids)
    nulls = sum(value is None for value in values)
    if nulls and nulls == difference:
        return "as many as there are nulls among them"
    # No id stands after a stop token: where one was cut off, the ids end without it.
    if difference == 1 and stopped and stop_ids and (not ids or ids[-1] not in stop_ids):
        return f"the ids lack the stop token ({' or '.join(map(str, stop_ids))}) that ended the turn"
    if difference == -1 and stopped and ids and ids[-1] in stop_ids:
        return f"the stop token {ids[-1]} at the end of the ids has no logprob"
    longest = max(len(list(run)) for _, run in groupby(prompt))
    if longest >= MIN_PLACEHOLDERS and difference and difference % longest == 0:
        return f"a multiple of the {longest} placeholders in a row in the prompt"
    return None
