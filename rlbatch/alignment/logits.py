"""The trainer's logits for a few suspect tokens, asked of the caller and checked before they are believed.

Most causes show in logprobs alone. The rest take logits, which nobody keeps: they are computed again, for the
segment in question and a window at a time, by a callback. Knows nothing of models.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.errors import AlignmentError, Where
from rlbatch_kernels import RESIDUAL_CLIP

LogitsFor: TypeAlias = Callable[[Batch, int, int, int], Tensor]
"""`logits_for(batch, index, start, stop) -> [stop - start, V]` float, on any device.

Row i predicts `batch.target_ids[row, start + i]`, `row` being that of `batch.host_segments[index]`; and
start:stop lies inside that segment and is at most `WINDOW_TOKENS` long. Logits are the model's own: not
divided by the temperature, of the sequence scored alone, in the mode that the trainer trains in. In a group
only the rank that has the segment asks, so that the answer must not wait for other ranks.
"""

WINDOW_TOKENS = 256
"""Positions asked for at once: 150 MiB of float32 at a vocabulary of 150,000."""


def ask(logits_for: LogitsFor, batch: Batch, index: int, start: int, stop: int, *, place: Where) -> Tensor:
    """[stop - start, V] float32 on the host, checked.

    Raises:
        AlignmentError: `batch-mismatch`, where the callback fails, or answers what was not asked.
    """
    expected = f"logits [{stop - start}, V] of positions {start}:{stop}, finite at the targets"
    try:
        with torch.no_grad():
            answer: Any = logits_for(batch, index, start, stop)
    except Exception as error:
        raise _refused(expected, f"{type(error).__name__}: {error}", place) from error
    if not isinstance(answer, Tensor) or not answer.is_floating_point():
        kind = type(answer).__name__ if not isinstance(answer, Tensor) else str(answer.dtype)
        raise _refused(expected, kind, place)
    if answer.dim() != 2 or answer.shape[0] != stop - start:
        raise _refused(expected, f"shape {list(answer.shape)}", place)
    row = batch.host_segments[index].row
    targets = batch.target_ids[row, start:stop].cpu()
    if int(targets.max()) >= answer.shape[1] or int(targets.min()) < 0:
        raise _refused(
            expected, f"a vocabulary of {answer.shape[1]}, targets up to {int(targets.max())}", place
        )
    logits = answer.detach().float().cpu()
    if not bool(torch.isfinite(logits[torch.arange(len(targets)), targets]).all()):
        raise _refused(expected, "NaN or infinity at a target", place)
    return logits


def require_finite(again: NDArray[np.float64], *, place: Where) -> NDArray[np.float64]:
    """The logprobs [n] that follow from logits; they are NaN where some logit is NaN or infinite.

    Raises:
        AlignmentError: `batch-mismatch`.
    """
    if not np.isfinite(again).all():
        raise _refused("logits whose softmax is finite", "NaN or infinity beside the targets", place)
    return again


def require_same_rows(
    again: NDArray[np.float64], trainer: NDArray[np.float64], inference: NDArray[np.float64], *, place: Where
) -> None:
    """Refuse logits of other rows: they speak for neither side, while the two sides agree with each other.

    Args:
        again: [n] nats, the logprobs that follow from the logits.
        trainer: [n] nats, as passed to the gate.
        inference: [n] nats.
        place: of the segment.

    Raises:
        AlignmentError: `batch-mismatch`.
    """
    between = np.minimum(np.abs(trainer - inference), RESIDUAL_CLIP).mean()
    apart = min(np.minimum(np.abs(again - side), RESIDUAL_CLIP).mean() for side in (trainer, inference))
    if len(again) >= 16 and apart > 0.5 and between < apart / 4:
        raise _refused(
            "logits of the rows asked for",
            f"logprobs {apart:.3g} nats from the trainer's, which are {between:.3g} from the engine's",
            place,
        )


def _refused(expected: str, found: str, place: Where) -> AlignmentError:
    return AlignmentError.of(
        finding(
            "batch-mismatch",
            where=place,
            expected=expected,
            found=found,
            likely="logits_for answered for another segment, another batch, or not at all",
            fix="give logits as rlbatch.alignment.LogitsFor says, or rlbatch.scoring.logits_for(model)",
        )
    )
