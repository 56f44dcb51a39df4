"""One pass over a batch on its device: ratios for the loss, and a [G, stats] table for the verdict.

Nothing here decides anything, and nothing waits for the device but `Measured.table`.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.errors import AlignmentError
from rlbatch_kernels import STAT_COLUMNS, PolicyRatio, alignment_stats, policy_ratio

COLUMN = {name: index for index, name in enumerate(STAT_COLUMNS)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """What one batch says, before anybody judges it."""

    batch: Batch
    trainer_logprobs: Tensor
    """[B, T] float32 or float64, detached."""
    ratio: PolicyRatio
    """[B, T] each; gradient reaches the trainer."""
    compared: Tensor
    """[B, T] bool: trained, finite on both sides, of comparable provenance."""
    _host: Tensor
    """[G * stats + 1] float64 on its way to the host: the table, then the count of trained positions."""
    _copied: "torch.cuda.Event | None" = field(default=None)

    def table(self) -> NDArray[np.float64]:
        """[G, stats] on the host; waits for the copy where it has not arrived."""
        return self._arrived()[:-1].reshape(len(self.batch.host_segments), len(STAT_COLUMNS))

    def num_trained(self) -> int:
        """Positions that `loss_mask` trains, inside segments or not."""
        return int(self._arrived()[-1])

    def _arrived(self) -> NDArray[np.float64]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()


def measure(batch: Batch, trainer_logprobs: Tensor) -> Measured:
    """Ratios and statistics of one batch.

    Args:
        batch: on the device of the logprobs.
        trainer_logprobs: [B, T] float32 or float64, nats, of `batch.target_ids`.

    Raises:
        AlignmentError: `batch-mismatch`, where the logprobs cannot be those of this batch.
    """
    _check(batch, trainer_logprobs)
    detached = trainer_logprobs.detach()
    inference = batch.inference_logprobs
    table = alignment_stats(detached, inference, batch.loss_mask, batch.segments)
    trained = batch.loss_mask.sum().to(torch.float64).reshape(1)
    host, copied = _to_host(torch.cat([table.reshape(-1), trained]))
    compared = batch.loss_mask & torch.isfinite(detached) & torch.isfinite(inference)
    if not all(provenance.comparable(batch.purpose) for provenance in batch.provenances):
        compared &= _comparable(batch).to(compared.device)
    return Measured(
        batch=batch,
        trainer_logprobs=detached,
        ratio=policy_ratio(trainer_logprobs, inference, compared),
        compared=compared,
        _host=host,
        _copied=copied,
    )


def _check(batch: Batch, trainer_logprobs: Tensor) -> None:
    expected = f"[{batch.shape[0]}, {batch.shape[1]}] float32 or float64 on {batch.loss_mask.device}"
    fits = (
        tuple(trainer_logprobs.shape) == batch.shape
        and trainer_logprobs.dtype in (torch.float32, torch.float64)
        and trainer_logprobs.device == batch.loss_mask.device
    )
    if not fits:
        raise AlignmentError.of(
            finding(
                "batch-mismatch",
                expected=f"trainer logprobs {expected}",
                found=f"{list(trainer_logprobs.shape)} {str(trainer_logprobs.dtype).removeprefix('torch.')} "
                f"on {trainer_logprobs.device}",
            )
        )


def _to_host(packed: Tensor) -> "tuple[Tensor, torch.cuda.Event | None]":
    """The one device-to-host copy; on CUDA it runs on and an event tells when it is done."""
    if packed.device.type != "cuda":
        return packed.cpu(), None
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event


def _comparable(batch: Batch) -> Tensor:
    mask = torch.zeros(batch.shape, dtype=torch.bool)
    for segment, provenance in zip(batch.host_segments, batch.provenances, strict=True):
        if provenance.comparable(batch.purpose):
            mask[segment.row, segment.start : segment.stop] = True
    return mask
