"""Faults of a packed or padded batch as arrays."""

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.faults.planting import NoPlaceError
from rlbatch.records import LayoutArrays

Chosen = list[int]
"""Indices of the sequences to spoil, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFault:
    """One way to spoil a batch's arrays."""

    code: str
    """Of the finding that names it."""
    story: str
    """How it comes about in real pipelines."""
    corrupt: InitVar[Callable[[LayoutArrays, Chosen], LayoutArrays]]
    """The arrays in, a spoilt copy out; the arrays themselves where they offer no place for this fault."""
    _spoil: Callable[[LayoutArrays, Chosen], LayoutArrays] = field(init=False, repr=False)
    """`corrupt`, for `plant` alone: by itself it says nothing where it finds no place."""

    def __post_init__(self, corrupt: Callable[[LayoutArrays, Chosen], LayoutArrays]) -> None:
        object.__setattr__(self, "_spoil", corrupt)

    def plant(self, arrays: LayoutArrays, rng: np.random.Generator, *, share: float = 1.0) -> LayoutArrays:
        """A copy with `share` of the sequences spoilt, at least one.

        Raises:
            NoPlaceError: the arrays offer no place for this fault.
        """
        num_sequences = len(_spans(arrays))
        count = max(1, round(share * num_sequences))
        chosen = sorted(rng.choice(num_sequences, count, replace=False).tolist())
        planted = self._spoil(arrays, chosen)
        if planted is arrays:
            raise NoPlaceError(f"plant: expected a place for {self.code!r}, found none")
        return planted


def _spans(arrays: LayoutArrays) -> list[tuple[int, int, int]]:
    """(row, start, stop) of each sequence, padding included."""
    rows, width = arrays.input_ids.shape
    if arrays.cu_seqlens is None:
        return [(row, 0, width) for row in range(rows)]
    bounds = arrays.cu_seqlens.tolist()
    return [(0, start, stop) for start, stop in pairwise(bounds)]


def _with_mask(arrays: LayoutArrays, mask: NDArray[np.bool_]) -> LayoutArrays:
    """Counts follow the mask, as they do in a pipeline that computes them from it."""
    changes: dict[str, Any] = {"loss_mask": mask}
    step = arrays.step_num_loss_tokens
    if step is not None:
        step += int(mask.sum()) - int(arrays.loss_mask.sum())
        changes["step_num_loss_tokens"] = step
    if arrays.normalizer is not None:
        changes["normalizer"] = int(mask.sum()) if step is None else step
    if arrays.sequence_num_loss_tokens is not None:
        counts = [mask[row, start:stop].sum() for row, start, stop in _spans(arrays)]
        changes["sequence_num_loss_tokens"] = np.array(counts, np.int64)
    return replace(arrays, **changes)


def _boundary_invalid(arrays: LayoutArrays, chosen: Chosen) -> LayoutArrays:
    if arrays.cu_seqlens is None:
        return arrays
    bounds = arrays.cu_seqlens.copy()
    # The boundaries were made before the last position was taken away; with several, one of them twice.
    if len(chosen) > 1:
        bounds[chosen[0]] = bounds[chosen[0] + 1]
    else:
        bounds[-1] += 1
    return replace(arrays, cu_seqlens=bounds)


def _edge_trained(arrays: LayoutArrays, chosen: Chosen) -> LayoutArrays:
    mask = arrays.loss_mask.copy()
    seen = np.ones(mask.shape, np.bool_) if arrays.attention_mask is None else arrays.attention_mask
    for index in chosen:
        row, start, stop = _spans(arrays)[index]
        real = np.flatnonzero(seen[row, start:stop]) + start
        mask[row, real[-1] if arrays.align == "target" else real[0]] = True
    return _with_mask(arrays, mask)


def _boundary_target(arrays: LayoutArrays, chosen: Chosen) -> LayoutArrays:
    return _edge_trained(arrays, chosen) if arrays.align == "target" else arrays


def _boundary_trained(arrays: LayoutArrays, chosen: Chosen) -> LayoutArrays:
    return _edge_trained(arrays, chosen) if arrays.align == "input" else arrays


def _positions_count_padding(arrays: LayoutArrays, chosen: Chosen) -> LayoutArrays:
    if arrays.position_ids is None or arrays.attention_mask is None:
        return arrays
    padded = np.flatnonzero(~arrays.attention_mask[:, 0]).tolist()
    if not padded:
        return arrays
    positions = arrays.position_ids.copy()
    positions[sorted(set(chosen) & set(padded)) or padded[:1]] = np.arange(positions.shape[1])
    return replace(arrays, position_ids=positions)


def _positions_not_restarted(arrays: LayoutArrays, chosen: Chosen) -> LayoutArrays:
    if arrays.position_ids is None or arrays.cu_seqlens is None or len(arrays.cu_seqlens) < 3:
        return arrays
    positions = arrays.position_ids.copy()
    for index in chosen:
        _, start, stop = _spans(arrays)[max(index, 1)]
        positions[0, start:stop] = np.arange(start, stop)
    return replace(arrays, position_ids=positions)


def _padding_too_short(arrays: LayoutArrays, chosen: Chosen) -> LayoutArrays:
    # The last position of a sequence is taken out; it and the one before it train nothing.
    if arrays.cu_seqlens is None or arrays.inference_logprobs is not None:
        return arrays
    spans = _spans(arrays)
    gone = [spans[index][2] - 1 for index in chosen]
    lengths = np.diff(arrays.cu_seqlens)
    lengths[chosen] -= 1
    mask = arrays.loss_mask.copy()
    mask[0, np.array(gone) - 1] = False
    shorter = replace(
        arrays,
        input_ids=np.delete(arrays.input_ids, gone, axis=1),
        loss_mask=np.delete(mask, gone, axis=1),
        position_ids=None if arrays.position_ids is None else np.delete(arrays.position_ids, gone, axis=1),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        max_seqlen=None if arrays.max_seqlen is None else int(lengths.max()),
    )
    return _with_mask(shorter, shorter.loss_mask)


def _length_field(arrays: LayoutArrays, chosen: Chosen) -> LayoutArrays:
    if arrays.sequence_num_loss_tokens is None:
        return arrays
    said = arrays.sequence_num_loss_tokens.copy()
    said[chosen] += 3
    return replace(arrays, sequence_num_loss_tokens=said)


def _normalizer(arrays: LayoutArrays, chosen: Chosen) -> LayoutArrays:
    return replace(arrays, normalizer=float(arrays.input_ids.size))


def _length_mismatch(arrays: LayoutArrays, chosen: Chosen) -> LayoutArrays:
    if arrays.inference_logprobs is None:
        return arrays
    width = arrays.input_ids.shape[1]
    first = [row * width + start for row, start, _ in (_spans(arrays)[index] for index in chosen)]
    return replace(arrays, inference_logprobs=np.delete(arrays.inference_logprobs, first))


LAYOUT = (
    LayoutFault(
        code="boundary-invalid",
        story="Boundaries were computed before the pack was cut to its length.",
        corrupt=_boundary_invalid,
    ),
    LayoutFault(
        code="boundary-target",
        story="The whole pack was rolled by one, and each sequence predicts the start of the next.",
        corrupt=_boundary_target,
    ),
    LayoutFault(
        code="boundary-trained",
        story="The mask covers the first token of a sequence.",
        corrupt=_boundary_trained,
    ),
    LayoutFault(
        code="positions-count-padding",
        story="Positions are arange over rows that are padded on the left.",
        corrupt=_positions_count_padding,
    ),
    LayoutFault(
        code="positions-not-restarted",
        story="Positions are arange over the pack.",
        corrupt=_positions_not_restarted,
    ),
    LayoutFault(
        code="padding-too-short",
        story="A filler was not padded for the ranks that share it.",
        corrupt=_padding_too_short,
    ),
    LayoutFault(
        code="length-field-mismatch",
        story="The span of a completion was counted, tool tokens included.",
        corrupt=_length_field,
    ),
    LayoutFault(
        code="normalizer-mismatch",
        story="The mask reached the numerator of the mean only.",
        corrupt=_normalizer,
    ),
    LayoutFault(
        code="length-mismatch",
        story="Logprobs of predictions were joined, one fewer than tokens for each sequence.",
        corrupt=_length_mismatch,
    ),
)
