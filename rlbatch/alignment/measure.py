"""One pass over a batch on its device: ratios for the loss, and a table of statistics for the verdict.

Nothing here decides anything, and nothing waits for the device but `Measured.windows`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.alignment.limits import WINDOW
from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.errors import AlignmentError
from rlbatch.records import Segment
from rlbatch_kernels import STAT_COLUMNS, PolicyRatio, alignment_stats, policy_ratio

COLUMN = {name: index for index, name in enumerate(STAT_COLUMNS)}
_MAXIMA = [COLUMN[name] for name in STAT_COLUMNS if name.startswith("max_")]


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
    first_window: NDArray[np.int64]
    """[G] which window begins each segment."""
    _host: Tensor
    """[W * stats + 1] float64 on its way to the host: the table, then the count of trained positions."""
    _copied: "torch.cuda.Event | None" = field(default=None)

    def windows(self) -> NDArray[np.float64]:
        """[W, stats], a row for each `WINDOW` tokens of a segment; waits where the copy has not arrived."""
        table: NDArray[np.float64] = rearrange(self._arrived()[:-1], "(w s) -> w s", s=len(STAT_COLUMNS))
        return table

    def table(self) -> NDArray[np.float64]:
        """[G, stats], a row a segment."""
        windows = self.windows()
        if not len(self.first_window):
            return windows
        table = np.add.reduceat(windows, self.first_window, axis=0)
        table[:, _MAXIMA] = np.maximum.reduceat(windows[:, _MAXIMA], self.first_window, axis=0)
        return table

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
    windows, first_window = _windows(batch.host_segments)
    table = alignment_stats(detached, inference, batch.loss_mask, windows)
    trained = batch.loss_mask.sum().to(torch.float64).reshape(1)
    host, copied = _to_host(torch.cat([rearrange(table, "w s -> (w s)"), trained]))
    compared = batch.loss_mask & torch.isfinite(detached) & torch.isfinite(inference)
    if not all(provenance.comparable(batch.purpose) for provenance in batch.provenances):
        compared &= _comparable(batch).to(compared.device)
    return Measured(
        batch=batch,
        trainer_logprobs=detached,
        ratio=policy_ratio(trainer_logprobs, inference, compared),
        compared=compared,
        first_window=first_window,
        _host=host,
        _copied=copied,
    )


def _windows(segments: Sequence[Segment]) -> tuple[Tensor, NDArray[np.int64]]:
    """[W, 4] int32 pieces of at most `WINDOW` positions, and the first piece of each segment [G]."""
    rows: list[tuple[int, int, int, int]] = []
    first: list[int] = []
    for part in segments:
        first.append(len(rows))
        starts = range(part.start, part.stop, WINDOW)
        rows += [(part.row, at, min(at + WINDOW, part.stop), part.turn) for at in starts]
    table = torch.tensor(rows, dtype=torch.int32) if rows else torch.empty(0, 4, dtype=torch.int32)
    return table, np.array(first, np.int64)


def _check(batch: Batch, trainer_logprobs: object) -> None:
    shape, device = list(batch.shape), batch.loss_mask.device
    expected = f"trainer logprobs {shape} float32 or float64 on {device}"
    if not isinstance(trainer_logprobs, Tensor):
        raise _mismatch(expected, type(trainer_logprobs).__name__)
    values = trainer_logprobs
    if (
        list(values.shape) != shape
        or values.dtype not in (torch.float32, torch.float64)
        or values.device != device
    ):
        dtype = str(values.dtype).removeprefix("torch.")
        raise _mismatch(expected, f"{list(values.shape)} {dtype} on {values.device}")


def _mismatch(expected: str, found: str) -> AlignmentError:
    return AlignmentError.of(finding("batch-mismatch", expected=expected, found=found))


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
