"""One row of a recorded rollout: what it says, and the decoded choice that it is. Knows nothing of files."""

import msgspec

from rlbatch.engines.body import TokenId
from rlbatch.engines.output import EngineOutput
from rlbatch.engines.routing import read_routing, routing_start
from rlbatch.errors import Where


class RecordedRow(msgspec.Struct, gc=False):
    """What is read of a row; None where it has none."""

    prompt_ids: list[TokenId] | None = None
    ids: list[TokenId] | None = None
    lp: list[float | None] | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    """null, where the main EOS ended it; a row without the key does not say."""
    routed_experts: str | None = None


def output_of(row: RecordedRow, label: str, where: Where) -> EngineOutput:
    """The row as a decoded choice.

    Raises:
        ReplyError: routed-experts-malformed or routed-experts-mismatch.
    """
    experts = read_routing(row.routed_experts, label=label)
    if experts is not None:
        # A rollout is whole: its rows begin with the prompt's first token.
        num_prompt, num_completion = len(row.prompt_ids or ()), len(row.ids or ())
        routing_start(
            len(experts), num_prompt=num_prompt, num_completion=num_completion, request={}, label=label
        )
    return EngineOutput(
        label=label,
        where=where,
        prompt_token_ids=row.prompt_ids,
        completion_token_ids=row.ids,
        logprobs=row.lp,
        finish_reason=row.finish_reason,
        stop_reason=None if row.stop_reason is msgspec.UNSET else row.stop_reason,
        text=row.text,
        routed_experts=experts,
    )
