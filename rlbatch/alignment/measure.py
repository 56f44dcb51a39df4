"""One pass over a batch on its device: ratios for the loss, and a table of statistics for the verdict.

Nothing here decides anything, and nothing waits for the device but `Measured.table` and `num_trained`.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.errors import AlignmentError, Where
from rlbatch.records import Provenance
from rlbatch_kernels import STAT_COLUMNS, PolicyRatio, alignment_stats, count_outside, policy_ratio

COLUMN = {name: index for index, name in enumerate(STAT_COLUMNS)}
LOGPROB_DTYPES = (torch.float32, torch.float64)
HALF_DTYPES = (torch.bfloat16, torch.float16)
_WHY_HALF = "logprobs were left in half precision, which rounds each by more than engine and trainer differ"
_FIX_HALF = "take log_softmax of logits.float(), or use rlbatch.scoring.trainer_logprobs(model, batch)"


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What one batch says, before anybody judges it. Ratios are computed when they are first asked for."""

    batch: Batch
    number: int | None
    """Which micro-batch of its step it is; None where it is the only one."""
    trainer_logprobs: Tensor
    """[B, T] float32 or float64, detached."""
    _attached: Tensor
    """The same with the gradient's way back."""
    _is_grad_enabled: bool
    """Whether gradients were recorded when the batch was measured."""
    _versions: tuple[int | None, ...]
    """What `_versions` gave then."""
    _table: Tensor
    """[G, stats] float64, on the host or on its way there."""
    _num_trained: Tensor
    """[] the same of the count of trained positions."""
    _copied: "torch.cuda.Event | None" = field(default=None)

    @cached_property
    def compared(self) -> Tensor:
        """[B, T] bool: trained, finite on both sides, of comparable provenance."""
        self._require_unchanged()
        batch = self.batch
        # Tensors of inference mode would be of no use to a backward.
        with torch.inference_mode(False):
            finite = torch.isfinite(self.trainer_logprobs) & torch.isfinite(batch.inference_logprobs)
            compared = batch.loss_mask & finite
            if not all(provenance.comparable(batch.purpose) for provenance, _ in self.by_provenance):
                compared &= _comparable(batch).to(compared.device)
        return compared

    @cached_property
    def ratio(self) -> PolicyRatio:
        """[B, T] each; gradient reaches the trainer."""
        self._require_unchanged()
        with torch.inference_mode(False), torch.set_grad_enabled(self._is_grad_enabled):
            return policy_ratio(self._attached, self.batch.inference_logprobs, self.compared)

    def _require_unchanged(self) -> None:
        if self._versions != _versions(self.batch, self._attached):
            raise AlignmentError.of(
                finding(
                    "batch-mismatch",
                    where=Where(batch=self.number),
                    expected="ratios of the values that were judged",
                    found="trainer logprobs, inference_logprobs or loss_mask changed in place since",
                    fix="read .ratio, .log_ratio, .inference_kld and .compared first, or change a clone",
                )
            )

    def table(self) -> NDArray[np.float64]:
        """[G, stats], a row a segment; waits where the copy has not arrived."""
        self._arrived()
        table: NDArray[np.float64] = self._table.numpy()
        return table

    def num_trained(self) -> int:
        """Positions that `loss_mask` trains, inside segments or not."""
        self._arrived()
        return int(self._num_trained)

    def _arrived(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    @cached_property
    def by_provenance(self) -> tuple[tuple[Provenance, NDArray[np.bool_]], ...]:
        """Each provenance of the batch with its segments [G]."""
        provenances = self.batch.provenances
        # Objects first, which are few and cost nothing to compare; then those that are equal.
        names = list(map(id, provenances))
        objects = dict(zip(names, provenances, strict=True))
        keys: dict[Provenance, int] = {}
        key_of = {name: keys.setdefault(provenance, len(keys)) for name, provenance in objects.items()}
        owner = np.array([key_of[name] for name in names], np.int64)
        return tuple((provenance, owner == key) for provenance, key in keys.items())


def measure(batch: Batch, trainer_logprobs: Tensor, *, number: int | None = None) -> Measured:
    """Ratios and statistics of one batch.

    Args:
        batch: on the device of the logprobs.
        trainer_logprobs: [B, T] float32 or float64, nats, of `batch.target_ids`.
        number: which micro-batch of its step it is, for findings; None where it is the only one.

    Raises:
        AlignmentError: `batch-mismatch`, where the logprobs cannot be those of this batch, or its own are of
            no dtype that can be compared.
    """
    _check(batch, trainer_logprobs, number)
    detached = trainer_logprobs.detach()
    table = alignment_stats(detached, batch.inference_logprobs, batch.loss_mask, _on_host(batch))
    on_host, num_trained, copied = _to_host(table, batch)
    return Measured(
        batch=batch,
        number=number,
        trainer_logprobs=detached,
        _attached=trainer_logprobs,
        _is_grad_enabled=torch.is_grad_enabled(),
        _versions=_versions(batch, trainer_logprobs),
        _table=on_host,
        _num_trained=num_trained,
        _copied=copied,
    )


def _versions(batch: Batch, trainer_logprobs: Tensor) -> tuple[int | None, ...]:
    """How often each tensor was changed in place; None where torch does not count."""
    tensors = (trainer_logprobs, batch.inference_logprobs, batch.loss_mask)
    return tuple(None if tensor.is_inference() else tensor._version for tensor in tensors)


def _on_host(batch: Batch) -> Tensor:
    """`batch.segments` on the host, without a copy from the device."""
    if batch.segments.device.type == "cpu":
        return batch.segments
    return torch.from_numpy(np.array(batch.host_segments, np.int32).reshape(-1, 4))


def _check(batch: Batch, trainer_logprobs: object, number: int | None) -> None:
    shape, device = torch.Size(batch.shape), batch.loss_mask.device
    expected = (
        ("trainer logprobs", trainer_logprobs, LOGPROB_DTYPES),
        ("inference_logprobs", batch.inference_logprobs, LOGPROB_DTYPES),
        ("loss_mask", batch.loss_mask, (torch.bool,)),
    )
    for name, value, dtypes in expected:
        found = type(value).__name__
        if isinstance(value, Tensor):
            if value.shape == shape and value.dtype in dtypes and value.device == device:
                continue
            found = f"{list(value.shape)} {_word(value.dtype)} on {value.device}"
        words = f"{name} {list(shape)} {' or '.join(map(_word, dtypes))} on {device}"
        raise _mismatch(words, found, number)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mismatch(expected: str, found: str, number: int | None) -> AlignmentError:
    where = Where(batch=number)
    is_half = any(_word(dtype) in found for dtype in HALF_DTYPES)
    return AlignmentError.of(
        finding(
            "batch-mismatch",
            where=where,
            expected=expected,
            found=found,
            likely=_WHY_HALF if is_half else None,
            fix=_FIX_HALF if is_half else None,
        )
    )


def _to_host(table: Tensor, batch: Batch) -> "tuple[Tensor, Tensor, torch.cuda.Event | None]":
    """The table, and how many positions are trained, by the one device-to-host copy.

    On CUDA it runs on and an event tells when it is done.
    """
    if table.device.type == "cpu":
        # What is in segments has been counted.
        inside = table[:, COLUMN["count"]].sum()
        return table, inside + count_outside(batch.loss_mask, batch.segments), None
    count = torch.count_nonzero(batch.loss_mask)
    if table.device.type != "cuda":
        return table.cpu(), count.cpu(), None
    packed = torch.cat([rearrange(table, "g s -> (g s)"), count.to(table.dtype).reshape(1)])
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return rearrange(host[:-1], "(g s) -> g s", s=table.shape[1]), host[-1], event


def _comparable(batch: Batch) -> Tensor:
    mask = torch.zeros(batch.shape, dtype=torch.bool)
    for segment, provenance in zip(batch.host_segments, batch.provenances, strict=True):
        if provenance.comparable(batch.purpose):
            mask[segment.row, segment.start : segment.stop] = True
    return mask
