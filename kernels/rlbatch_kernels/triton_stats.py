"""`segment_stats` by Triton's kernels: one pass over float32 logprobs on CUDA."""

import torch
from torch import Tensor

from rlbatch_kernels import stats, triton_library
from rlbatch_kernels.per_token import KINDS, Written
from rlbatch_kernels.reference import MAX_EXPONENT

PIECE = 4096
"""Tokens of a segment that one program takes: enough to pay for its reductions, and many programs a batch.

Whole windows: none is of two programs.
"""

BLOCK = 512
"""Tokens at once: two a thread, as 27 results of each token are held in registers."""

NUM_WARPS = 8

PARTIAL_WIDTH = 32
"""Columns of a partial result: STAT_COLUMNS, filled up to a power of two."""


def segment_stats(
    trainer: Tensor, inference: Tensor, mask: Tensor, segments: Tensor, written: Written | None = None
) -> Tensor:
    """The table [G, len(STAT_COLUMNS)] float64, as `stats.segment_stats`; arguments are trusted.

    A token's numbers are float32, as are sums of up to PIECE / BLOCK tokens; all others float64. No
    device-to-host copy.
    """
    num_columns = len(stats.STAT_COLUMNS)
    table = torch.empty(len(segments), num_columns, dtype=torch.float64, device=trainer.device)
    if not len(segments):
        return table
    bounds, ends = (host.to(trainer.device) for host in _pieces(segments, trainer.shape[1]))
    partials = torch.empty(len(bounds), PARTIAL_WIDTH, dtype=torch.float64, device=trainer.device)
    kernels, loss = triton_library.stats(), None if written is None else written.loss
    with triton_library.on_device_of(trainer):
        if len(bounds):
            kernels.pieces[(len(bounds),)](
                trainer.contiguous(),
                inference.contiguous(),
                mask.contiguous().view(torch.uint8),
                None if written is None else written.out,
                None if written is None else written.advantages,
                bounds,
                partials,
                MAX_EXPONENT,
                stats.K3_CAP,
                stats.ZERO_NEEDS_BELOW,
                stats.CONFIDENT_FROM,
                stats.DISAGREES_BY,
                stats.RESIDUAL_CLIP,
                stats.WINDOW_LEAST,
                0.0 if loss is None else loss.low,
                0.0 if loss is None else loss.high,
                KIND="" if written is None else KINDS[written.kind],
                BLOCK=BLOCK,
                WINDOW=stats.WINDOW,
                WIDTH=PARTIAL_WIDTH,
                num_warps=NUM_WARPS,
            )
        kernels.combine[(len(segments),)](
            partials, ends, table, NUM_COLUMNS=num_columns, WIDTH=PARTIAL_WIDTH, num_warps=1
        )
    return table


def _pieces(segments: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
    """Bounds [P, 4] of the pieces of [G, 4] segments on the host, and [G + 1]: where each one's pieces begin.

    Example:
        one segment (0, 10, 5010, 0) -> [[10, 5010, 10, 4106], [10, 5010, 4106, 5010]] and [0, 2]
    """
    row, start, stop = segments[:, 0], segments[:, 1], segments[:, 2]
    counts = (stop - start + PIECE - 1) // PIECE
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    owner = torch.arange(len(segments)).repeat_interleave(counts)
    first = start[owner] + (torch.arange(len(owner)) - ends[owner]) * PIECE
    last = torch.minimum(first + PIECE, stop[owner])
    bounds = torch.stack([start[owner], stop[owner], first, last], dim=1)
    return bounds + (row[owner] * num_positions).unsqueeze(1), ends
