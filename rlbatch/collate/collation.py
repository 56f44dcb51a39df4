"""`collate`: samples into one batch.

A field with `align = target` moves one to the left within its sequence, so that position t concerns the
prediction of token t + 1; a field with `align = input` stays. Nothing is truncated, and padding is only what
the layout and the caller need.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbatch.batch import Allocate, Batch, Layout, MediaTensor, SampleRef
from rlbatch.batch.buffer import Slot, fresh, place_slots
from rlbatch.collate.columns import Column, columns_of, write_attention_mask, write_position_ids
from rlbatch.collate.media import MediaColumn, media_of
from rlbatch.collate.place import Padding, Place
from rlbatch.collate.segments import Parts
from rlbatch.errors import RecordError, SoundnessError
from rlbatch.packing import StepInfo
from rlbatch.records import PURPOSES, Origin, Purpose, Sample, check_samples, origins_of
from rlbatch.records.structure import check_choice
from rlbatch.soundness import check_sound

DEFAULT_PADDING = Padding()


def collate(
    samples: Sequence[Sample],
    *,
    layout: Layout,
    purpose: Purpose = "train",
    origins: Sequence[Origin] | None = None,
    padding: Padding = DEFAULT_PADDING,
    allocate: Allocate = fresh,
    step: StepInfo | None = None,
) -> Batch:
    """One micro-batch, on the host, in one flat buffer.

    Args:
        samples: at least one.
        layout: `padded`, a row a sample, or `packed`, all in one row.
        purpose: under `audit`, turns that have raw values only are given those at temperature 1.
        origins: one a sample; without, the place in `samples` is all that a finding can say.
        padding: with what, on which side, and to multiples of what.
        allocate: number of bytes -> the uint8 tensor to lay the batch in, pinned or reused as the caller
            likes. What it holds does not matter: every byte of every field is written.
        step: the optimizer step that the batch is part of; a loader says it, None where nobody does.

    Raises:
        SoundnessError: advantage-not-finite, unless for an audit: the one value that is looked at here, since
            no later gate reads it.
        RecordError: no samples, or what is none; origins of another number; modes-mixed, turns with raw
            and with processed logprobs; media in a packed batch, or of several shapes; routed experts of
            other numbers of layers or experts a token; a word that is no layout or purpose; memory that
            cannot hold the batch.

    Example:
        token_ids [1, 5, 7, 2] with 7, 2 sampled at -0.1, -0.2:
        input_ids [1, 5, 7, 2], target_ids [5, 7, 2, -100], inference_logprobs [NaN, -0.1, -0.2, NaN]
    """
    check_choice("purpose", purpose, PURPOSES)
    check_samples(samples)
    if not samples:
        raise RecordError("collate: expected at least one sample, found none")
    if origins is not None:
        origins_of(samples, origins)
    if purpose == "audit":
        samples = [for_audit(sample) for sample in samples]
    place = Place.of([len(sample) for sample in samples], layout, padding)
    parts = Parts.of(samples, place, origins)
    media = media_of(samples, layout)
    columns = columns_of(samples, padding.token_id)
    tensors = _tensors(columns, media, place, parts, allocate)
    if purpose != "audit":
        _require_advantages(samples, tensors["advantages"], purpose, origins)
    num_loss_tokens = tuple([sample.num_loss_tokens for sample in samples])
    return Batch(
        **tensors,
        max_seqlen=place.longest_sequence if layout == "packed" else None,
        host_segments=parts.segments,
        segment_versions=parts.versions,
        provenances=parts.provenances,
        refs=_refs(samples, origins, place),
        purpose=purpose,
        sequence_num_tokens=tuple(place.lengths),
        sequence_num_loss_tokens=num_loss_tokens,
        sequence_num_siblings=tuple([sample.num_siblings for sample in samples]),
        sequence_siblings=tuple([sample.sibling for sample in samples]),
        sequence_rewards=tuple([sample.reward for sample in samples]),
        sequence_provenances=tuple([sample.provenances for sample in samples]),
        sequence_finish_reasons=tuple([sample.finish_reasons for sample in samples]),
        sequence_stop_reasons=tuple([sample.stop_reasons for sample in samples]),
        num_loss_tokens=sum(num_loss_tokens),
        num_trajectories=sum(sample.sibling == 0 for sample in samples),
        step=step,
    )


def _require_advantages(
    samples: Sequence[Sample], values: Tensor, purpose: Purpose, origins: Sequence[Origin] | None
) -> None:
    """Refuse a trained token whose advantage is not finite: it would spoil the loss of all others.

    Args:
        samples: those of the batch.
        values: [B, T] float32, their advantages in the batch.
        purpose: of the batch; not `audit`.
        origins: where they are stored.

    Raises:
        SoundnessError: advantage-not-finite, for each sample.
    """
    # A sum is finite only where all of it is: almost always one quick look is all.
    if bool(torch.isfinite(values.sum())):
        return
    findings = check_sound(samples, purpose=purpose, origins=origins)
    missing = [found for found in findings if found.code == "advantage-not-finite"]
    if missing:
        raise SoundnessError.of(*missing)


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


def _tensors(
    columns: Sequence[Column], media: Sequence[MediaColumn], place: Place, parts: Parts, allocate: Allocate
) -> dict[str, Any]:
    """The batch's tensors by name, written into one buffer, the media, and the buffer."""
    packed = place.boundaries() if place.layout == "packed" else None
    slots = {column.name: column.slot(place) for column in columns}
    if not media:
        slots["position_ids"] = Slot(dtype=torch.int64, shape=place.shape)
    if packed is None:
        slots["attention_mask"] = Slot(dtype=torch.bool, shape=place.shape)
    else:
        slots["cu_seqlens"] = Slot(dtype=torch.int32, shape=(len(packed),))
    slots["segments"] = Slot(dtype=torch.int32, shape=(len(parts.segments), 4))
    buffer, views = place_slots([*slots.values(), *(part.slot() for part in media)], allocate)
    tensors: dict[str, Any] = dict(zip(slots, views, strict=False))
    joined = views[len(slots) :]
    for part, tensor in zip(media, joined, strict=True):
        part.write(tensor.numpy())
    for column in columns:
        column.write(tensors[column.name].numpy(), place)
    if not media:
        write_position_ids(tensors["position_ids"].numpy(), place)
    if packed is None:
        write_attention_mask(tensors["attention_mask"].numpy(), place)
    else:
        tensors["cu_seqlens"].numpy()[:] = packed
    tensors["segments"].numpy()[:] = parts.table()
    tensors["media"] = tuple(
        MediaTensor(name=part.name, values=tensor, num_rows=part.num_rows)
        for part, tensor in zip(media, joined, strict=True)
    )
    return {"position_ids": None, **tensors, "buffer": buffer}


def _refs(samples: Sequence[Sample], origins: Sequence[Origin] | None, place: Place) -> tuple[SampleRef, ...]:
    paths = repeat(None) if origins is None else (origin.path for origin in origins)
    indices = range(len(samples)) if origins is None else (origin.index for origin in origins)
    return tuple(
        [
            SampleRef(
                path=path,
                index=index,
                sample_id=sample.sample_id,
                trajectory_id=sample.trajectory_id,
                group_id=sample.group_id,
                token_offset=at,
            )
            for sample, path, index, at in zip(samples, paths, indices, place.starts, strict=False)
        ]
    )
