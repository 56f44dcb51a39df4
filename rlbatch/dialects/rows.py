"""Rows of prompt and completion, TRL's and verl's shape: [B, P] padded left and [B, R] padded right."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.dialects.dialect import at_trained, merged, split
from rlbatch.errors import RecordError
from rlbatch.records import TOKEN_FIELDS, Sample

FILLER = 0.0
"""Both write 0 where a token has no logprob, and mask it."""

_UNSAID = {spec.name: spec.padding for spec in TOKEN_FIELDS}


def prompts(columns: Sequence[NDArray[Any]], samples: Sequence[Sample], filler: float = 0) -> Tensor:
    """[B, P] the part before the first sampled token, padded on the left."""
    parts = [column[: split(sample)] for column, sample in zip(columns, samples, strict=True)]
    width = max(map(len, parts))
    return _stacked([_padded(part, (width - len(part), 0), filler) for part in parts])


def completions(columns: Sequence[NDArray[Any]], samples: Sequence[Sample], filler: float = 0) -> Tensor:
    """[B, R] the part from the first sampled token on, padded on the right."""
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


def shaped(form: Mapping[str, Any], key: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the form.

    Raises:
        RecordError: it is none, or of another shape.
    """
    value = form[key]
    if not isinstance(value, Tensor):
        raise RecordError(f"from_dict: expected {key} as a tensor, found {type(value).__name__}")
    if tuple(value.shape) != shape:
        raise RecordError(f"from_dict: expected {key} of shape {list(shape)}, found {list(value.shape)}")
    return value


def width(form: Mapping[str, Any], key: str, num_rows: int) -> int:
    """W of a tensor [B, W] of the form.

    Raises:
        RecordError: it is none, or not of that many rows.
    """
    value = form[key]
    if not isinstance(value, Tensor) or value.ndim != 2 or len(value) != num_rows:
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise RecordError(f"from_dict: expected {key} of shape [{num_rows}, any], found {found}")
    return int(value.shape[1])


def own_tokens(
    left: Tensor, right: Tensor, left_mask: Tensor, right_mask: Tensor, samples: Sequence[Sample]
) -> list[NDArray[Any]]:
    """[T] a sample, from its prompt and its completion.

    Raises:
        RecordError: lengths are not those of the samples.
    """
    columns = []
    for row, sample in enumerate(samples):
        parts = [left[row][left_mask[row] != 0], right[row][right_mask[row] != 0]]
        column = torch.cat(parts).cpu().numpy()
        expected = (split(sample), len(sample) - split(sample))
        if (len(parts[0]), len(parts[1])) != expected:
            raise RecordError(
                f"from_dict: expected {expected[0]} prompt and {expected[1]} completion tokens in row {row}, "
                f"found {len(parts[0])} and {len(parts[1])}"
            )
        columns.append(column)
    return columns


def widened(completion: Tensor, mask: Tensor, samples: Sequence[Sample]) -> list[NDArray[Any]]:
    """[T] a sample, from a tensor over completions; 0 at prompt tokens."""
    columns = []
    for row, sample in enumerate(samples):
        own = completion[row][mask[row] != 0].cpu().numpy()
        columns.append(np.concatenate([np.zeros(split(sample), own.dtype), own]))
    return columns


def changes(
    samples: Sequence[Sample],
    token_ids: Sequence[NDArray[Any]],
    trained: Sequence[NDArray[Any]],
    fields: Mapping[str, Sequence[NDArray[Any]]],
) -> list[dict[str, Any]]:
    """What changes of each sample: ids, mask, and each field at the trained tokens."""
    result = []
    for row, sample in enumerate(samples):
        mask = trained[row].astype(np.bool_)
        changed = {"token_ids": token_ids[row].astype(np.int32), "loss_mask": mask}
        for name, columns in fields.items():
            own, incoming = getattr(sample, name), columns[row].astype(np.float32)
            if own is not None or mask.any():
                changed[name] = merged(own, incoming, mask, _UNSAID[name])
        result.append(changed)
    return result


def _padded(part: NDArray[Any], widths: tuple[int, int], filler: float) -> NDArray[Any]:
    return np.pad(part, (widths, *[(0, 0)] * (part.ndim - 1)), constant_values=filler)


def _stacked(rows: Sequence[NDArray[Any]]) -> Tensor:
    return torch.from_numpy(np.stack(rows))
