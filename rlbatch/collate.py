"""`list[Sample]` -> `Batch`: the one place where anything is shifted.

A field with `align = target` moves one to the left within its sequence, so that position t concerns the
prediction of token t + 1; a field with `align = input` stays. Nothing is truncated, and padding is only what
the layout needs. Knows nothing of files or models.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rlbatch.batch import LAYOUTS, NO_EXPERT, NO_TARGET, Batch, Layout, SampleRef
from rlbatch.errors import RecordError
from rlbatch.records import (
    PURPOSES,
    TOKEN_FIELDS,
    UNKNOWN_VERSION,
    Origin,
    Purpose,
    Sample,
    Segment,
    TokenField,
    check_samples,
    origins_of,
    sampled_segments,
)
from rlbatch.records.structure import check_choice

PaddingSide: TypeAlias = Literal["left", "right"]
PADDING_SIDES: tuple[PaddingSide, ...] = ("left", "right")


def collate(
    samples: Sequence[Sample],
    *,
    layout: Layout,
    purpose: Purpose = "train",
    origins: Sequence[Origin] | None = None,
    pad_token_id: int = 0,
    padding_side: PaddingSide = "right",
) -> Batch:
    """One micro-batch, on the host.

    Args:
        samples: at least one.
        layout: `padded`, a row a sample, or `packed`, all in one row.
        purpose: under `audit`, turns that have raw values only are given those at temperature 1.
        origins: one a sample; without, the place in `samples` is all that a finding can say.
        pad_token_id: `input_ids` in padding (padded only).
        padding_side: where padding goes (padded only).

    Raises:
        RecordError: no samples, or what is none; origins of another number; turns with raw and with
            processed logprobs mixed; routed experts of some samples only, or of other numbers of layers or
            experts a token; a word that is no layout, purpose or side.

    Example:
        token_ids [1, 5, 7, 2] with 7, 2 sampled at -0.1, -0.2:
        input_ids [1, 5, 7, 2], target_ids [5, 7, 2, -100], inference_logprobs [NaN, -0.1, -0.2, NaN]
    """
    _check_arguments(samples, layout, purpose, padding_side)
    origins = origins_of(samples, origins)
    if purpose == "audit":
        samples = [for_audit(sample) for sample in samples]
    place = _Place.of([len(sample) for sample in samples], layout, padding_side)
    parts = list(_parts(samples, place))
    num_loss_tokens = tuple(int(np.count_nonzero(sample.loss_mask[1:])) for sample in samples)
    return Batch(
        input_ids=torch.from_numpy(_input_ids(samples, place, pad_token_id)),
        target_ids=torch.from_numpy(_target_ids(samples, place)),
        position_ids=torch.from_numpy(place.position_ids()),
        attention_mask=torch.from_numpy(place.attention_mask()) if layout == "padded" else None,
        cu_seqlens=torch.from_numpy(place.cu_seqlens()) if layout == "packed" else None,
        max_seqlen=max(place.lengths) if layout == "packed" else None,
        **_target_columns(samples, place),
        routed_experts=_routed_experts(samples, place),
        segments=_segment_table(parts),
        host_segments=tuple(part.in_batch for part in parts),
        segment_versions=tuple(_version(part) for part in parts),
        provenances=_provenances(parts),
        refs=_refs(samples, origins, place),
        purpose=purpose,
        sequence_num_loss_tokens=num_loss_tokens,
        sequence_num_siblings=tuple(sample.num_siblings for sample in samples),
        num_loss_tokens=sum(num_loss_tokens),
        num_trajectories=sum(sample.sibling == 0 for sample in samples),
    )


def _check_arguments(samples: object, layout: str, purpose: str, padding_side: str) -> None:
    check_choice("layout", layout, LAYOUTS)
    check_choice("purpose", purpose, PURPOSES)
    check_choice("padding_side", padding_side, PADDING_SIDES)
    check_samples(samples)
    if not samples:
        raise RecordError("collate: expected at least one sample, found none")


def for_audit(sample: Sample) -> Sample:
    """The sample with raw values, at temperature 1, in the turns that have nothing else to compare."""
    raw = sample.raw_inference_logprobs
    turns = [
        turn
        for turn, provenance in enumerate(sample.provenances)
        if provenance.logprobs_mode == "raw" and not provenance.gives_behaviour_logprobs
    ]
    if raw is None or not turns:
        return sample
    chosen = np.isin(sample.turn, turns)
    return replace(
        sample,
        inference_logprobs=np.where(chosen, raw, sample.inference_logprobs),
        temperature=np.where(chosen, np.float32(1), sample.temperature),
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where each sequence lies in the [B, T] grid."""

    shape: tuple[int, int]
    lengths: list[int]
    rows: list[int]
    starts: list[int]

    @classmethod
    def of(cls, lengths: list[int], layout: Layout, padding_side: PaddingSide) -> "_Place":
        if layout == "packed":
            ends = np.cumsum(lengths).tolist()
            return cls((1, ends[-1]), lengths, [0] * len(lengths), [0, *ends[:-1]])
        width = max(lengths)
        starts = [width - length if padding_side == "left" else 0 for length in lengths]
        return cls((len(lengths), width), lengths, list(range(len(lengths))), starts)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(row, start, length) of each sequence."""
        return zip(self.rows, self.starts, self.lengths, strict=True)

    def position_ids(self) -> NDArray[np.int64]:
        # Counted from the end of what came before, so that padding on either side starts at 0 as well.
        out = np.broadcast_to(np.arange(self.shape[1]), self.shape).copy()
        for row, start, length in self:
            out[row, start:] -= out[row, start]
            if start + length < self.shape[1]:
                out[row, start + length :] -= length
        return out

    def attention_mask(self) -> NDArray[np.bool_]:
        out = np.zeros(self.shape, bool)
        for row, start, length in self:
            out[row, start : start + length] = True
        return out

    def cu_seqlens(self) -> NDArray[np.int32]:
        return np.array([*self.starts, self.shape[1]], np.int32)


class _Part(NamedTuple):
    """One segment, in its sample and in the batch."""

    sample: Sample
    in_sample: Segment
    in_batch: Segment


def _parts(samples: Sequence[Sample], place: _Place) -> Iterator[_Part]:
    for sample, (row, at, _) in zip(samples, place, strict=True):
        for part in sampled_segments(sample.turn):
            # Token t is predicted at position t - 1.
            moved = Segment(row=row, start=at + part.start - 1, stop=at + part.stop - 1, turn=part.turn)
            yield _Part(sample, part, moved)


def _input_ids(samples: Sequence[Sample], place: _Place, pad_token_id: int) -> NDArray[np.int64]:
    out = np.full(place.shape, pad_token_id, np.int64)
    for sample, (row, at, length) in zip(samples, place, strict=True):
        out[row, at : at + length] = sample.token_ids
    return out


def _target_ids(samples: Sequence[Sample], place: _Place) -> NDArray[np.int64]:
    out = np.full(place.shape, NO_TARGET, np.int64)
    for sample, (row, at, length) in zip(samples, place, strict=True):
        out[row, at : at + length - 1] = sample.token_ids[1:]
    return out


def _target_columns(samples: Sequence[Sample], place: _Place) -> dict[str, Any]:
    """The fields with `align = target`, by name: the one shift. `turn` becomes the segments instead."""
    return {
        spec.name: torch.from_numpy(_target_column(samples, spec, place))
        for spec in TOKEN_FIELDS
        if spec.align == "target" and spec.name != "turn"
        if any(getattr(sample, spec.name) is not None for sample in samples)
    }


def _target_column(samples: Sequence[Sample], spec: TokenField, place: _Place) -> NDArray[Any]:
    out = np.full(place.shape, spec.padding, spec.dtype)
    for sample, (row, at, length) in zip(samples, place, strict=True):
        values = getattr(sample, spec.name)
        if values is not None:
            out[row, at : at + length - 1] = values[1:]
    return out


def _routed_experts(samples: Sequence[Sample], place: _Place) -> torch.Tensor | None:
    """[B, T, L, K]: `align = input`, so row t of a sample stays at token t."""
    shapes = {sample.routed_experts.shape[1:] for sample in samples if sample.routed_experts is not None}
    num_with = sum(sample.routed_experts is not None for sample in samples)
    if not shapes:
        return None
    if num_with != len(samples):
        raise RecordError(
            "collate: expected routed experts of every sample or of none, "
            f"found them in {num_with} of {len(samples)}"
        )
    if len(shapes) > 1:
        found = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise RecordError(f"collate: expected one [layers, experts a token] in a batch, found {found}")
    out = np.full((*place.shape, *shapes.pop()), NO_EXPERT, np.int32)
    for sample, (row, at, length) in zip(samples, place, strict=True):
        out[row, at : at + length - 1] = sample.routed_experts
    return torch.from_numpy(out)


def _segment_table(parts: Sequence[_Part]) -> torch.Tensor:
    rows = [(part.row, part.start, part.stop, part.turn) for _, _, part in parts]
    # Without a single segment the list has no second axis to give.
    return torch.tensor(rows, dtype=torch.int32) if rows else torch.empty(0, 4, dtype=torch.int32)


def _provenances(parts: Sequence[_Part]) -> tuple[Any, ...]:
    provenances = tuple(part.sample.provenances[part.in_sample.turn] for part in parts)
    modes = sorted({provenance.logprobs_mode for provenance in provenances})
    if len(modes) > 1:
        raise RecordError(f"collate: expected turns of one logprobs_mode, found {' and '.join(modes)}")
    return provenances


def _version(part: _Part) -> int:
    """The one version that drew a segment, or -1."""
    versions = np.unique(part.sample.policy_version[part.in_sample.start : part.in_sample.stop])
    return int(versions[0]) if len(versions) == 1 else UNKNOWN_VERSION


def _refs(samples: Sequence[Sample], origins: Sequence[Origin], place: _Place) -> tuple[SampleRef, ...]:
    return tuple(
        SampleRef(
            path=origin.path,
            index=origin.index,
            sample_id=sample.sample_id,
            trajectory_id=sample.trajectory_id,
            group_id=sample.group_id,
            token_offset=at,
        )
        for sample, origin, (_, at, _) in zip(samples, origins, place, strict=True)
    )
