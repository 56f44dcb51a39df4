"""`Batch`: the typed tensors of one micro-batch, padded or packed. Made by `rlbatch.collate` alone.

Position t of every tensor concerns the prediction of `target_ids[t]` from `input_ids[..t]`; nobody shifts
again. Knows nothing of models or trainers.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rlbatch.records import Provenance, Purpose, Segment

Layout: TypeAlias = Literal["padded", "packed"]

LAYOUTS: tuple[Layout, ...] = ("padded", "packed")

NO_TARGET = -100
"""`target_ids` where there is nothing to predict: the last position of each sequence, and padding."""

NO_EXPERT = -1
"""`routed_experts` where no token was passed through: the last position of each sequence, and padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRef:
    """Which sample a sequence of the batch is: what a finding prints."""

    path: str | None
    """File it came from, None where it was never stored."""
    index: int
    """Its index in that file, or in the list that was collated."""
    sample_id: str
    trajectory_id: str
    group_id: str | None
    token_offset: int
    """Batch position of its token 0 within its row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One micro-batch. Padded: [B, T], a row a sequence. Packed: [1, T], sequences one after another."""

    input_ids: Tensor
    """[B, T] int64; 0 or `pad_token_id` in padding."""
    target_ids: Tensor
    """[B, T] int64; -100 where there is no target."""
    position_ids: Tensor
    """[B, T] int64; restart at 0 in every sequence; padding restarts too and is never counted."""
    inference_logprobs: Tensor
    """[B, T] float32, nats; NaN where the target was not sampled."""
    loss_mask: Tensor
    """[B, T] bool; True where the target is trained."""
    advantages: Tensor
    """[B, T] float32; 0 where the target was not sampled."""
    temperature: Tensor
    """[B, T] float32; what the target's logits were divided by; 1 where it was not sampled."""
    policy_version: Tensor
    """[B, T] int32; -1 where the target was not sampled, or by unknown weights."""
    attention_mask: Tensor | None = None
    """[B, T] bool, True at tokens, False at padding; None when packed."""
    cu_seqlens: Tensor | None = None
    """[S+1] int32, cumulative sequence lengths; None when padded."""
    max_seqlen: int | None = None
    """Longest sequence of the pack; None when padded."""
    raw_inference_logprobs: Tensor | None = None
    """[B, T] float32, nats at temperature 1; NaN where absent."""
    teacher_logprobs: Tensor | None = None
    """[B, T] float32, nats; NaN where not trained."""
    ref_logprobs: Tensor | None = None
    """[B, T] float32, nats; NaN where not trained."""
    proximal_logprobs: Tensor | None = None
    """[B, T] float32, nats; NaN where not trained."""
    routed_experts: Tensor | None = None
    """[B, T, L, K] int32; the pass over `input_ids[t]`: it stays with its token. -1 where there was none: the
    last position of each sequence, and padding."""
    segments: Tensor
    """[G, 4] int32 (row, start, stop, turn), half-open, in batch positions."""
    host_segments: tuple[Segment, ...]
    """The same on the host."""
    segment_versions: tuple[int, ...]
    """[G] the one version that drew the segment; -1 where unknown or more than one."""
    provenances: tuple[Provenance, ...]
    """One a segment."""
    refs: tuple[SampleRef, ...]
    """One a sequence."""
    purpose: Purpose
    """`audit`: values are raw ones at temperature 1 where the engine gave only those."""
    sequence_num_loss_tokens: tuple[int, ...]
    """[S] trained tokens of each sequence."""
    sequence_num_siblings: tuple[int, ...]
    """[S] how many samples the sequence's trajectory became."""
    num_loss_tokens: int
    """Trained tokens. A step's normaliser is the sum over its micro-batches and ranks."""
    num_trajectories: int
    """Trajectories that begin in this batch (sibling 0): sums to the step's count, each counted once."""

    @property
    def layout(self) -> Layout:
        """`packed` where there are `cu_seqlens`."""
        return "padded" if self.cu_seqlens is None else "packed"

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return int(self.input_ids.shape[0]), int(self.input_ids.shape[1])

    def ref_of(self, segment: Segment) -> SampleRef:
        """The sample a segment belongs to."""
        if self.layout == "padded":
            return self.refs[segment.row]
        return self.refs[bisect_right(self.refs, segment.start, key=lambda ref: ref.token_offset) - 1]

    def tokens_of(self, segment: Segment) -> tuple[int, int]:
        """The segment's half-open span in its sample's own `token_ids`: position t predicts token t + 1."""
        offset = self.ref_of(segment).token_offset
        return segment.start - offset + 1, segment.stop - offset + 1

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Self:
        """The batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self, device: torch.device | str | None = None) -> Self:
        """The batch in page-locked host memory; `DataLoader(pin_memory=True)` calls it."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in _tensors(self)}
        return replace(self, **changed)


def _tensors(batch: Batch) -> list[tuple[str, Tensor]]:
    values = ((spec.name, getattr(batch, spec.name)) for spec in fields(batch))
    return [(name, value) for name, value in values if isinstance(value, Tensor)]


_Static: TypeAlias = tuple[tuple[str, Any], ...]
"""(name, value) of everything in a batch that is not a tensor: two batches of one structure have it equal."""


def _flatten(batch: Batch) -> tuple[list[Tensor], tuple[tuple[str, ...], _Static]]:
    named = _tensors(batch)
    names = tuple(name for name, _ in named)
    static = tuple((spec.name, getattr(batch, spec.name)) for spec in fields(batch) if spec.name not in names)
    return [tensor for _, tensor in named], (names, static)


def _unflatten(leaves: Iterable[Any], context: tuple[tuple[str, ...], _Static]) -> Batch:
    names, static = context
    return Batch(**dict(static), **dict(zip(names, leaves, strict=True)))


pytree.register_pytree_node(Batch, _flatten, _unflatten, serialized_type_name="rlbatch.batch.Batch")
