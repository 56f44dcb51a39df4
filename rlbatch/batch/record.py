"""`Batch` and what it is made of.

Position t of every tensor concerns the prediction of `target_ids[t]` from `input_ids[..t]`; nobody shifts
again. A batch that was collated lies in one flat buffer, and its tensors are views of it.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rlbatch.batch.buffer import Slot, slot_in
from rlbatch.errors import RecordError
from rlbatch.packing import StepInfo
from rlbatch.records import FinishReason, Provenance, Purpose, Segment, StopReason

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
class MediaTensor:
    """One input besides tokens, of all samples of a batch, one after another along the first axis."""

    name: str
    """The model's keyword argument, as `pixel_values`."""
    values: Tensor
    """[N, ...]."""
    num_rows: tuple[int, ...]
    """[S] how many of the N are each sequence's; 0 where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One micro-batch. Padded: [B, T], a row a sequence. Packed: [1, T], sequences one after another."""

    input_ids: Tensor
    """[B, T] int64; `Padding.token_id` in padding."""
    target_ids: Tensor
    """[B, T] int64; -100 where there is no target."""
    position_ids: Tensor | None
    """[B, T] int64; restart at 0 in every sequence; padding restarts too and is never counted. None where a
    sample has media: the model computes them from the pictures' sizes."""
    inference_logprobs: Tensor
    """[B, T] float32, nats; NaN where the target was not sampled."""
    loss_mask: Tensor
    """[B, T] bool; True where the target is trained."""
    advantages: Tensor
    """[B, T] float32; 0 where the target was not sampled; NaN where nobody has said it, which is not trained:
    choose by `loss_mask` before adding up, since 0 times NaN is NaN."""
    temperature: Tensor
    """[B, T] float32; what the target's logits were divided by; 1 where it was not sampled."""
    policy_version: Tensor
    """[B, T] int32; -1 where the target was not sampled, or by unknown weights."""
    attention_mask: Tensor | None = None
    """[B, T] bool, True at tokens, False at padding; None when packed."""
    cu_seqlens: Tensor | None = None
    """[S+1] int32, where sequences begin and end, each with its own padding where they were padded to a
    multiple; where the row was, the pieces of padding behind them are entries too. None when padded."""
    max_seqlen: int | None = None
    """Longest entry of `cu_seqlens`; None when padded."""
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
    last position of each sequence, samples without, and padding."""
    media: tuple[MediaTensor, ...] = ()
    """Inputs besides tokens; padded batches only."""
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
    sequence_num_tokens: tuple[int, ...]
    """[S] length of each sequence, without padding."""
    sequence_num_loss_tokens: tuple[int, ...]
    """[S] trained tokens of each sequence."""
    sequence_num_siblings: tuple[int, ...]
    """[S] how many samples the sequence's trajectory became."""
    sequence_siblings: tuple[int, ...]
    """[S] which of those it is."""
    sequence_rewards: tuple[float | None, ...]
    """[S]"""
    sequence_provenances: tuple[tuple[Provenance, ...], ...]
    """[S] of each sequence's turns, those without a segment too."""
    sequence_finish_reasons: tuple[tuple[FinishReason | None, ...], ...]
    """[S] of each sequence's turns; empty where nobody said."""
    sequence_stop_reasons: tuple[tuple[StopReason | None, ...], ...]
    """[S] of each sequence's turns; empty where nobody kept them."""
    num_loss_tokens: int
    """Trained tokens. A step's normaliser is the sum over its micro-batches and ranks."""
    num_trajectories: int
    """Trajectories that begin in this batch (sibling 0): sums to the step's count where the step holds the
    first sample of each; `step.num_trajectories` counts them all."""
    step: StepInfo | None = None
    """The optimiser step that the batch is part of, and its normalisers; None where no loader said."""
    buffer: Tensor | None = None
    """Flat uint8; the memory under the tensors, each at a multiple of 256 bytes. None where they are tensors
    of their own, as after a map over the pytree."""

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
        return self.refs[self.sequence_of(segment)]

    def sequence_of(self, segment: Segment) -> int:
        """Which sequence of the batch a segment is part of: the place of its sample in `refs`."""
        if self.layout == "padded":
            return segment.row
        return bisect_right(self.refs, segment.start, key=lambda ref: ref.token_offset) - 1

    def tokens_of(self, segment: Segment) -> tuple[int, int]:
        """The segment's half-open span in its sample's own `token_ids`: position t predicts token t + 1."""
        offset = self.ref_of(segment).token_offset
        return segment.start - offset + 1, segment.stop - offset + 1

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> "Batch":
        """The batch with its tensors on `device`: one copy of the buffer, where they lie in one.

        Raises:
            RecordError: `device` is none, such as a dtype: what each tensor holds has one dtype.
        """
        if not isinstance(device, (torch.device, str, int)):
            raise RecordError(
                f"Batch.to: expected a device, found {type(device).__name__} {device}; the dtypes of a batch "
                "are fixed, so cast the model, or what is made of single tensors"
            )
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self, device: torch.device | str | None = None) -> "Batch":
        """The batch in page-locked host memory; `DataLoader(pin_memory=True)` calls it."""
        return self._map(lambda tensor: tensor.pin_memory())

    def as_dict(self, dialect: str, *, drop: Collection[str] = ()) -> dict[str, Any]:
        """The batch in a trainer's names and shapes, by `rlbatch.dialects.as_dict`."""
        # Here, for dialects are made of batches; this method is only their door.
        from rlbatch.dialects import as_dict

        return as_dict(self, dialect, drop=drop)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        leaves, context = _flatten(self)
        buffer = None if self.buffer is None else change(self.buffer)
        changed = [_changed(leaf, slot_in(self.buffer, leaf), buffer, change) for leaf in leaves]
        return _unflatten(changed, context, buffer)

    def __reduce__(self) -> tuple[object, ...]:
        # The buffer once: each view alone would take the whole of it along.
        leaves, context = _flatten(self)
        buffer = _alone(self.buffer)
        return _unpickle, (buffer, [slot_in(self.buffer, leaf) or leaf for leaf in leaves], context)


def _changed(
    leaf: Tensor, slot: Slot | None, buffer: Tensor | None, change: Callable[[Tensor], Tensor]
) -> Tensor:
    return change(leaf) if slot is None or buffer is None else slot.of(buffer)


def _alone(buffer: Tensor | None) -> Tensor | None:
    """The buffer in storage of its own size, however large the memory is that it was cut from."""
    if buffer is None or buffer.untyped_storage().nbytes() == buffer.numel():
        return buffer
    return buffer.clone()


_Context: TypeAlias = tuple[
    tuple[str, ...], tuple[tuple[str, Any], ...], tuple[tuple[str, tuple[int, ...]], ...]
]
"""Names of the tensors; (name, value) of the rest; (name, num_rows) of the media: the batch's structure."""


def _flatten(batch: Batch) -> tuple[list[Tensor], _Context]:
    values = {spec.name: getattr(batch, spec.name) for spec in fields(batch) if spec.name not in _NOT_LEAVES}
    named = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    static = tuple((name, value) for name, value in values.items() if name not in named)
    media = tuple((part.name, part.num_rows) for part in batch.media)
    return [*named.values(), *(part.values for part in batch.media)], (tuple(named), static, media)


_NOT_LEAVES = ("buffer", "media")


def _unflatten(leaves: Iterable[Any], context: _Context, buffer: Tensor | None = None) -> Batch:
    # After a map over the tree the tensors are whatever the map made: they lie in no common buffer any more.
    names, static, media = context
    rest = iter(leaves)
    tensors = {name: next(rest) for name in names}
    parts = tuple(
        MediaTensor(name=name, values=values, num_rows=num_rows)
        for (name, num_rows), values in zip(media, rest, strict=True)
    )
    return Batch(**dict(static), **tensors, media=parts, buffer=buffer)


def _unpickle(buffer: Tensor | None, leaves: Sequence[Slot | Tensor], context: _Context) -> Batch:
    tensors = [leaf if isinstance(leaf, Tensor) or buffer is None else leaf.of(buffer) for leaf in leaves]
    return _unflatten(tensors, context, buffer)


pytree.register_pytree_node(Batch, _flatten, _unflatten, serialized_type_name="rlbatch.batch.Batch")
