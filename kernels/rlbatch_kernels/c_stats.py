"""`segment_stats` by the C kernel: one pass over float32 logprobs on the CPU."""

import ctypes

import torch
from torch import Tensor

from rlbatch_kernels import c_library, stats
from rlbatch_kernels.per_token import Written
from rlbatch_kernels.reference import MAX_EXPONENT

LIMITS = c_library.Limits(
    max_exponent=MAX_EXPONENT,
    k3_cap=stats.K3_CAP,
    zero_needs_below=stats.ZERO_NEEDS_BELOW,
    confident_from=stats.CONFIDENT_FROM,
    disagrees_by=stats.DISAGREES_BY,
    residual_clip=stats.RESIDUAL_CLIP,
    window_least=stats.WINDOW_LEAST,
)


def segment_stats(
    trainer: Tensor, inference: Tensor, mask: Tensor, segments: Tensor, written: Written | None = None
) -> Tensor:
    """The table [G, len(STAT_COLUMNS)] float64, as `stats.segment_stats`; arguments are trusted.

    A token's numbers are float32, as are sums of up to 64 tokens a lane; all others float64.
    """
    trainer, inference, mask = trainer.contiguous(), inference.contiguous(), mask.contiguous()
    segments = segments.to(torch.int64).contiguous()
    table = torch.empty(len(segments), len(stats.STAT_COLUMNS), dtype=torch.float64)
    failed = c_library.functions().rlb_alignment_stats(
        c_library.pointer(trainer),
        c_library.pointer(inference),
        c_library.pointer(mask),
        None if written is None else ctypes.byref(_described(written)),
        trainer.shape[1],
        c_library.pointer(segments),
        len(segments),
        ctypes.byref(LIMITS),
        c_library.pointer(table),
        c_library.level(),
        c_library.num_threads(int((segments[:, 2] - segments[:, 1]).sum())),
    )
    if failed:
        raise MemoryError(f"alignment_stats: no memory for partial results of {len(segments)} segments")
    return table


def count_outside(mask: Tensor, segments: Tensor) -> int:
    """As `stats.count_outside`, reading nothing else of the mask than what it counts."""
    segments = segments.to(torch.int64)
    starts = segments[:, 0] * mask.shape[1] + segments[:, 1]
    segments, mask = segments[starts.argsort()], mask.contiguous()
    return int(
        c_library.functions().rlb_count_outside(
            c_library.pointer(mask), mask.numel(), mask.shape[1], c_library.pointer(segments), len(segments)
        )
    )


def _described(written: Written) -> c_library.Written:
    loss = written.loss
    return c_library.Written(
        out=c_library.pointer(written.out),
        advantages=c_library.pointer(written.advantages),
        kind=written.kind,
        low=0.0 if loss is None else loss.low,
        high=0.0 if loss is None else loss.high,
    )
