"""How a completion ended, as reply and request say it, held against its ids.

Fewer ids than were asked for prove nothing: a full context or a limit of the server's may have ended them.
"""

from collections.abc import Sequence

from rlbatch.engines.output import EngineOutput
from rlbatch.engines.refusals import refusal


def check_ends(outputs: Sequence[EngineOutput], limits: Sequence[int | None]) -> None:
    """Refuse ids that do not end with the stop token that is named, or are more than were asked for.

    Args:
        outputs: the choices; a `stop_reason` that is a stop string says nothing of ids.
        limits: the most tokens that the request asked for, a choice; None where it does not say.

    Raises:
        ReplyError: finish-mismatch or statement-contradicted.

    Example:
        ids [5, 4] with stop_reason 4, limit 2 -> None; with stop_reason 2, or limit 1: refused
    """
    for output, limit in zip(outputs, limits, strict=True):
        if output.aligned:
            # Lists of unequal lengths are refused by `to_turn`, which has more to say.
            _check_end(output.label, output.completion_token_ids or (), output.stop_reason, limit)


def _check_end(label: str, ids: Sequence[int], stop_reason: int | str | None, limit: int | None) -> None:
    if isinstance(stop_reason, int) and (not ids or ids[-1] != stop_reason):
        found = f"{label}: the last of {len(ids)} ids is another" if ids else f"{label}: no ids"
        raise refusal("finish-mismatch", "the stop token that the engine names as the last sampled id", found)
    if limit is not None and len(ids) > limit:
        expected = f"at most the {limit} tokens that the request asked for"
        raise refusal("statement-contradicted", expected, f"{label}: {len(ids)} ids")
