"""One row of a recorded rollout: what it says, and the decoded choice that it is. Knows nothing of files."""

from typing import Annotated

import msgspec

from rlbatch.assemble import MAX_VERSION
from rlbatch.engines.body import TokenId
from rlbatch.engines.output import EngineOutput
from rlbatch.engines.routing import read_routing, routing_start
from rlbatch.errors import Where
from rlbatch.records import VersionSpan


class RecordedRow(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """What a row says; None where it says nothing. What cannot be carried is refused: it would be lost."""

    prompt_ids: list[TokenId] | None = None
    ids: list[TokenId] | None = None
    lp: list[float | None] | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    """null, where the main EOS ended it; a row without the key does not say."""
    routed_experts: str | None = None
    trajectory_id: str | None = None
    """Without one, a row is named by its file and place."""
    group_id: str | None = None
    """Without one, rows of one prompt are a group."""
    reward: float | None = None
    advantage: float | None = None
    """Of every sampled token."""
    policy_version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)] | None = None
    """Of the weights that drew all of `ids`."""


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
    spans: tuple[VersionSpan, ...] = ()
    if row.policy_version is not None and row.ids:
        spans = (VersionSpan(label=str(row.policy_version), start=0, stop=len(row.ids)),)
    return EngineOutput(
        label=label,
        where=where,
        prompt_token_ids=row.prompt_ids,
        completion_token_ids=row.ids,
        logprobs=row.lp,
        finish_reason=row.finish_reason,
        stop_reason=None if row.stop_reason is msgspec.UNSET else row.stop_reason,
        text=row.text,
        policy_versions=spans,
        routed_experts=experts,
    )
