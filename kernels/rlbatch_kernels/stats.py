"""`alignment_stats` in plain torch, and `STAT_COLUMNS`, the one list of its columns.

All in float64. Each segment's numbers are summed by themselves, in the order of its tokens, so they do not
depend, to the bit, on what else is in the batch or on how it is laid out. Knows no limits and no verdicts.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlbatch_kernels.errors import ShapeError
from rlbatch_kernels.per_token import Written
from rlbatch_kernels.reference import bounded, k3

LAGS = (-2, -1, 0, 1, 2)
"""Lag k pairs inference_logprobs[t] with trainer_logprobs[t + k]."""

RESIDUAL_CLIP = 4.0
"""A pair adds at most this to a residual, in nats: one outlier must not decide a lag.

At 2 the rare surprising tokens of a peaked row weigh too little: truncated sampling at the true lag then
leaves 0.28 of the next best lag, at 4 it leaves 0.16.
"""

K3_CAP = 1.0
"""A token adds at most this to `sum_k3_capped`, in nats."""

ZERO_NEEDS_BELOW = torch.tensor(-1e-3, dtype=torch.float32).item()
"""An inference logprob of exactly 0 is counted where the trainer is below this; nearer 0 it may be true."""

CONFIDENT_FROM = torch.tensor(math.log(0.5), dtype=torch.float32).item()
"""Engine probability one half, rounded as the float32 logprobs are."""

DISAGREES_BY = 2.0
"""Trainer this many nats below a confident engine."""

WINDOW = 64
"""Tokens, counted from the start of their segment, that are one window: what is wrong in one stretch must not
drown in the rest. The last window of a segment may be shorter."""

WINDOW_LEAST = torch.tensor(0.02, dtype=torch.float32).item()
"""Mean clipped |difference| at lag 0, nats, below which a window counts as 0 in the largest of them.

So a stretch in which no token differs by as much costs nothing. No lag could be told from noise there.
"""

TOKENS_AT_ONCE = 2**18
"""Whole segments are taken together up to this many tokens: 35 columns of them are 70 MiB."""

STAT_COLUMNS: tuple[str, ...] = (
    "count",
    "num_compared",
    "sum_log_ratio",
    "sum_abs_log_ratio",
    "sum_sq_log_ratio",
    "sum_k3",
    "sum_k3_capped",
    "sum_ratio",
    "sum_sq_ratio",
    "max_abs_log_ratio",
    "max_inference",
    "num_zeros",
    "num_confident_disagreements",
    "num_trainer_not_finite",
    "num_inference_not_finite",
    *(f"residual_sum_{lag}" for lag in LAGS),
    *(f"residual_pairs_{lag}" for lag in LAGS),
    "first_num_compared",
    "first_sum_abs_log_ratio",
    "max_window_residual",
    "max_window_lag_gain",
)
"""Columns of the table, in order; what each holds is said in `rlbatch_kernels.alignment_stats`."""

_MAXIMA = ("max_abs_log_ratio", "max_inference")
_OF_WINDOWS = ("max_window_residual", "max_window_lag_gain")
"""Maxima too, but over windows."""


def column(table: Tensor, name: str) -> Tensor:
    """The column [..., G] of a table [..., G, len(STAT_COLUMNS)].

    Raises:
        KeyError: no column of this name.
        ShapeError: `table` is not as wide as `STAT_COLUMNS`.
    """
    if name not in STAT_COLUMNS:
        raise KeyError(f"no column {name!r}; STAT_COLUMNS has {', '.join(STAT_COLUMNS)}")
    if table.dim() == 0 or table.shape[-1] != len(STAT_COLUMNS):
        raise ShapeError(f"table: found shape {list(table.shape)}, expected [..., {len(STAT_COLUMNS)}]")
    return table[..., STAT_COLUMNS.index(name)]


def segment_stats(
    trainer: Tensor, inference: Tensor, mask: Tensor, segments: Tensor, written: Written | None = None
) -> Tensor:
    """The table [G, len(STAT_COLUMNS)] float64 on the device of the logprobs; arguments are trusted.

    `segments` are on the host. Where `written` is given, so is what it asks for, of every token of a segment.
    """
    lengths: list[int] = (segments[:, 2] - segments[:, 1]).tolist()
    segments = segments.to(trainer.device, non_blocking=True)
    table = torch.empty(len(lengths), len(STAT_COLUMNS), dtype=torch.float64, device=trainer.device)
    for first, last in _blocks(lengths):
        block, sizes = segments[first:last].to(torch.int64), lengths[first:last]
        num_windows = sum(-(-size // WINDOW) for size in sizes)
        table[first:last] = _block_stats(trainer, inference, mask, block, sum(sizes), num_windows, written)
    return table


def count_outside(mask: Tensor, segments: Tensor) -> int:
    """How many positions outside of all segments a mask [B, T] on the host trains; arguments are trusted."""
    num_rows, num_positions = mask.shape
    row, start, stop = segments.to(torch.int64)[:, :3].unbind(1)
    # One more a row: a segment may stop behind the last position.
    edges = torch.zeros(num_rows, num_positions + 1, dtype=torch.int32)
    for place, step in ((start, 1), (stop, -1)):
        edges.index_put_((row, place), torch.tensor(step, dtype=torch.int32), accumulate=True)
    return int((mask & (edges.cumsum(1)[:, :-1] == 0)).sum())


def _blocks(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    first, tokens = 0, 0
    for index, length in enumerate(lengths):
        if index > first and tokens + length > TOKENS_AT_ONCE:
            yield first, index
            first, tokens = index, 0
        tokens += length
    if first < len(lengths):
        yield first, len(lengths)


def _block_stats(
    trainer: Tensor,
    inference: Tensor,
    mask: Tensor,
    segments: Tensor,
    num_tokens: int,
    num_windows: int,
    written: Written | None,
) -> Tensor:
    lengths = segments[:, 2] - segments[:, 1]
    # [M]: which segment a token is of, and its place in it. One segment's tokens lie side by side.
    owner = torch.arange(len(lengths), device=lengths.device).repeat_interleave(
        lengths, output_size=num_tokens
    )
    begins = lengths.cumsum(0) - lengths
    offset = torch.arange(num_tokens, device=lengths.device) - begins[owner]
    where = (segments[owner, 0], segments[owner, 1] + offset)
    tokens = (trainer[where].to(torch.float64), inference[where].to(torch.float64), mask[where])
    values = _token_values(*tokens)
    if written is not None:
        written.put(where, *tokens)
    values |= _residuals(*tokens, offset, lengths[owner])
    is_first = offset < WINDOW
    values["first_num_compared"] = values["num_compared"] & is_first
    values["first_sum_abs_log_ratio"] = torch.where(is_first, values["sum_abs_log_ratio"], 0.0)
    sums = [name for name in STAT_COLUMNS if name not in (*_MAXIMA, *_OF_WINDOWS)]
    results = _reduce("sum", values, sums, lengths) | _reduce("max", values, list(_MAXIMA), lengths)
    # Over no token at all the largest |log_ratio| is 0, and the largest logprob -inf.
    results["max_abs_log_ratio"] = results["max_abs_log_ratio"].clamp(min=0.0)
    results |= _of_windows(tokens, offset, lengths, num_windows)
    return torch.stack([results[name] for name in STAT_COLUMNS], dim=1)


def _token_values(trainer: Tensor, inference: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """What each token [M] adds to each column but the residuals."""
    compared = mask & trainer.isfinite() & inference.isfinite()
    log_ratio = torch.where(compared, trainer - inference, 0.0)
    ratio = torch.where(compared, bounded(log_ratio).exp(), 0.0)
    nats = k3(log_ratio)
    return {
        "count": mask,
        "num_compared": compared,
        "sum_log_ratio": log_ratio,
        "sum_abs_log_ratio": log_ratio.abs(),
        "sum_sq_log_ratio": log_ratio.square(),
        "sum_k3": nats,
        "sum_k3_capped": nats.clamp(max=K3_CAP),
        "sum_ratio": ratio,
        "sum_sq_ratio": ratio.square(),
        "max_abs_log_ratio": log_ratio.abs(),
        "max_inference": torch.where(compared, inference, -math.inf),
        "num_zeros": compared & (inference == 0) & (trainer < ZERO_NEEDS_BELOW),
        "num_confident_disagreements": compared & (inference >= CONFIDENT_FROM) & (log_ratio < -DISAGREES_BY),
        "num_trainer_not_finite": mask & ~trainer.isfinite(),
        "num_inference_not_finite": mask & ~inference.isfinite(),
    }


def _residuals(
    trainer: Tensor, inference: Tensor, mask: Tensor, offset: Tensor, length: Tensor
) -> dict[str, Tensor]:
    """Residual and pair [M] at each lag of each token as t, at `offset` among its `length` neighbours."""
    values: dict[str, Tensor] = {}
    for lag in LAGS:
        # roll brings t + lag to t; where it wraps round, it is not inside.
        inside = (offset + lag >= 0) & (offset + lag < length)
        partner, partner_mask = trainer.roll(-lag), mask.roll(-lag)
        paired = inside & mask & partner_mask & inference.isfinite() & partner.isfinite()
        apart = (inference - partner).abs().clamp(max=RESIDUAL_CLIP)
        values[f"residual_sum_{lag}"] = torch.where(paired, apart, 0.0)
        values[f"residual_pairs_{lag}"] = paired
    return values


def _of_windows(
    tokens: tuple[Tensor, Tensor, Tensor], offset: Tensor, lengths: Tensor, num_windows: int
) -> dict[str, Tensor]:
    """The largest over the windows of each segment [G]; a pair has both its ends in one window."""
    counts = (lengths + WINDOW - 1) // WINDOW
    owner = torch.arange(len(lengths), device=lengths.device).repeat_interleave(
        counts, output_size=num_windows
    )
    number = torch.arange(num_windows, device=lengths.device) - (counts.cumsum(0) - counts)[owner]
    sizes = (lengths[owner] - number * WINDOW).clamp(max=WINDOW)
    values = _residuals(*tokens, offset % WINDOW, sizes.repeat_interleave(sizes, output_size=len(offset)))
    sums = _reduce("sum", values, list(values), sizes)
    means = {lag: sums[f"residual_sum_{lag}"] / sums[f"residual_pairs_{lag}"] for lag in LAGS}
    # A lag without pairs, of which the mean is NaN, gains nothing.
    others = torch.stack([means[lag].nan_to_num(math.inf) for lag in LAGS if lag]).amin(0)
    is_loud = means[0] >= WINDOW_LEAST
    gain = torch.where(is_loud, 1 - others / means[0], 0.0)
    largest = {"max_window_residual": torch.where(is_loud, means[0], 0.0), "max_window_lag_gain": gain}
    found = _reduce("max", largest, list(largest), counts)
    return {name: each.clamp(min=0.0) for name, each in found.items()}


def _reduce(how: str, values: dict[str, Tensor], names: list[str], lengths: Tensor) -> dict[str, Tensor]:
    # Always two columns or more: segment_reduce then goes through each segment token by token on every
    # device, while one column on CUDA takes another path, whose order may depend on the alignment.
    data = torch.stack([values[name].to(torch.float64) for name in names], dim=1)
    initial = 0.0 if how == "sum" else -math.inf
    reduced = torch.segment_reduce(data, how, lengths=lengths, initial=initial, unsafe=True)
    return dict(zip(names, reduced.unbind(1), strict=True))
