"""Rows of prompt and completion, TRL's and verl's shape: [B, P] padded left and [B, R] padded right."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.dialects.dialect import FILLER, at_trained, merged, split
from rlbatch.dialects.reading import as_int32
from rlbatch.errors import RecordError
from rlbatch.records import Sample


def prompts(columns: Sequence[NDArray[Any]], samples: Sequence[Sample], filler: float = 0) -> Tensor:
    """[B, P] the part before the split, padded on the left."""
    parts = [column[: split(sample)] for column, sample in zip(columns, samples, strict=True)]
    width = max(map(len, parts))
    return _stacked([_padded(part, (width - len(part), 0), filler) for part in parts])


def completions(columns: Sequence[NDArray[Any]], samples: Sequence[Sample], filler: float = 0) -> Tensor:
    """[B, R] the part from the split on, padded on the right."""
    parts = [column[split(sample) :] for column, sample in zip(columns, samples, strict=True)]
    width = max(map(len, parts))
    return _stacked([_padded(part, (0, width - len(part)), filler) for part in parts])


def ones(samples: Sequence[Sample]) -> list[NDArray[np.int64]]:
    """[T] of ones a sample: what masks are made of."""
    return [np.ones(len(sample), np.int64) for sample in samples]


def ids(samples: Sequence[Sample]) -> list[NDArray[np.int64]]:
    """[T] int64 ids a sample."""
    return [sample.token_ids.astype(np.int64) for sample in samples]


def masks(samples: Sequence[Sample]) -> list[NDArray[np.int64]]:
    """[T] 1 where trained, a sample."""
    return [sample.loss_mask.astype(np.int64) for sample in samples]


def trained_values(samples: Sequence[Sample], name: str) -> list[NDArray[np.float32]]:
    """[T] a field a sample where trained, the filler elsewhere; who has none has no trained token."""
    return [
        np.full(len(sample), FILLER, np.float32)
        if getattr(sample, name) is None
        else at_trained(sample, getattr(sample, name), FILLER)
        for sample in samples
    ]


def any_has(samples: Sequence[Sample], name: str) -> bool:
    """Whether a field is there at all."""
    return any(getattr(sample, name) is not None for sample in samples)


def one_a_row(samples: Sequence[Sample], name: str, unsaid: float) -> Tensor:
    """[B] the one value of each row's trained tokens; `unsaid` in rows without any."""
    values = [
        float(getattr(sample, name)[sample.loss_mask][0]) if sample.loss_mask.any() else unsaid
        for sample in samples
    ]
    return torch.tensor(values, dtype=torch.float32)


def own_tokens(
    left: NDArray[Any],
    right: NDArray[Any],
    left_mask: NDArray[np.bool_],
    right_mask: NDArray[np.bool_],
    samples: Sequence[Sample],
) -> list[NDArray[Any]]:
    """[T] a sample, from its prompt and its completion.

    Raises:
        RecordError: lengths are not those of the samples.
    """
    columns = []
    for row, sample in enumerate(samples):
        parts = [left[row][left_mask[row]], right[row][right_mask[row]]]
        expected = (split(sample), len(sample) - split(sample))
        if (len(parts[0]), len(parts[1])) != expected:
            raise RecordError(
                f"from_dict: expected {expected[0]} prompt and {expected[1]} completion tokens in row {row}, "
                f"found {len(parts[0])} and {len(parts[1])}"
            )
        columns.append(np.concatenate(parts))
    return columns


def widened(
    completion: NDArray[Any], mask: NDArray[np.bool_], samples: Sequence[Sample]
) -> list[NDArray[Any]]:
    """[T] a sample, from an array over completions; 0 at prompt tokens."""
    columns = []
    for row, sample in enumerate(samples):
        own = completion[row][mask[row]]
        columns.append(np.concatenate([np.zeros(split(sample), own.dtype), own]))
    return columns


def changes(
    samples: Sequence[Sample],
    token_ids: Sequence[NDArray[Any]],
    trained: Sequence[NDArray[np.bool_]],
    fields: Mapping[str, Sequence[NDArray[Any]]],
) -> list[dict[str, Any]]:
    """What changes of each sample: ids, mask, and each field at the trained tokens.

    Raises:
        RecordError: ids or values that a sample cannot hold; a token trained from now on without a value.
    """
    result = []
    for row, sample in enumerate(samples):
        mask = trained[row]
        changed: dict[str, Any] = {"token_ids": as_int32("token ids", token_ids[row]), "loss_mask": mask}
        for name, columns in fields.items():
            if getattr(sample, name) is not None or mask.any():
                changed[name] = merged(sample, name, columns[row], mask)
        result.append(changed)
    return result


def with_experts(
    changed: Sequence[dict[str, Any]], samples: Sequence[Sample], columns: Sequence[NDArray[Any]]
) -> None:
    """Add [T-1, L, K] of [T, L, K] experts to the changes of each sample that has some."""
    for change, sample, column in zip(changed, samples, columns, strict=True):
        if sample.routed_experts is not None:
            change["routed_experts"] = as_int32("routed_experts", column[:-1])


def expert_shape(samples: Sequence[Sample]) -> tuple[int, ...]:
    """(L, K); () where no sample has any."""
    return next((each.routed_experts.shape[1:] for each in samples if each.routed_experts is not None), ())


def _padded(part: NDArray[Any], widths: tuple[int, int], filler: float) -> NDArray[Any]:
    return np.pad(part, (widths, *[(0, 0)] * (part.ndim - 1)), constant_values=filler)


def _stacked(rows: Sequence[NDArray[Any]]) -> Tensor:
    return torch.from_numpy(np.stack(rows))
