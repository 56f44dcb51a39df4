"""The public ops over logprobs: `policy_ratio` for the loss, `alignment_stats` for the verdict.

Arguments are checked here, once. Knows nothing of batches, records or verdicts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlbatch_kernels import backends, c_library, c_stats, stats
from rlbatch_kernels.arguments import (
    LOGPROB_DTYPES,
    MAX_OFFENDERS_SHOWN,
    SEGMENT_DTYPES,
    require_device,
    require_shape,
    require_tensor,
)
from rlbatch_kernels.errors import ShapeError
from rlbatch_kernels.per_token import PolicyLoss, Written, require_loss
from rlbatch_kernels.reference import bounded, k3
from rlbatch_kernels.uncompiled import uncompiled


class PolicyRatio(NamedTuple):
    """What `policy_ratio` returns: three tensors [B, T] that agree with each other."""

    log_ratio: Tensor
    """trainer - inference, nats; 0 where not trained. Never clamped."""
    ratio: Tensor
    """exp(log_ratio), its exponent clamped to +-20; 1 where not trained."""
    inference_kld: Tensor
    """k3 = ratio - 1 - log_ratio >= 0, nats; 0 where not trained."""


class AlignmentStats(NamedTuple):
    """What `alignment_stats_and_ratio` returns."""

    table: Tensor
    """[G, len(STAT_COLUMNS)] float64, as `alignment_stats` gives it."""
    ratio: Tensor
    """[B, T]: exp(log_ratio), clamped as in `PolicyRatio`, of the compared tokens of segments; else 1."""


class PolicyGradient(NamedTuple):
    """What `alignment_stats_and_policy_gradient` returns."""

    table: Tensor
    """[G, len(STAT_COLUMNS)] float64, as `alignment_stats` gives it."""
    gradient: Tensor
    """[B, T]: of the loss summed over the trained tokens of segments, to the trainer's logprobs; else 0."""


@uncompiled
def policy_ratio(trainer_logprobs: Tensor, inference_logprobs: Tensor, loss_mask: Tensor) -> PolicyRatio:
    """Importance ratio and inference KLD of every trained token.

    ratio = exp(trainer - inference); inference_kld = ratio - 1 - log_ratio >= 0. What is not finite at a
    trained position shows in the results as the arithmetic has it (NaN, inf; ratio 0 for a log_ratio of
    -inf); it is not refused here. Beyond |log_ratio| = 20 the ratio is constant, so its gradient is 0; that
    of inference_kld is ratio - 1 everywhere.

    Args:
        trainer_logprobs: [B, T] float32 or float64, nats; of target_ids under the trained weights.
        inference_logprobs: [B, T] float32 or float64, nats; of the same tokens when sampled; a constant.
        loss_mask: [B, T] bool; elsewhere log_ratio 0, ratio 1, inference_kld 0, and no gradient, whatever
            the logprobs hold there.

    Returns:
        Three [B, T] tensors, float32 (float64 if either argument is); gradient reaches trainer_logprobs only.

    Raises:
        ShapeError: the three shapes differ.
        DtypeError: logprobs in half precision or not float, a mask that is not bool, devices that differ.

    Example:
        trainer [-1.0], inference [-1.5] -> log_ratio 0.5, ratio 1.6487, inference_kld 0.1487

    Source: Schulman 2020, "Approximating KL Divergence", estimator k3.
    """
    _require_logprobs(trainer_logprobs, inference_logprobs, "loss_mask", loss_mask)
    # Masked before exp: where(mask, exp(t - i), 1) has a finite value and a NaN gradient.
    trainer = torch.where(loss_mask, trainer_logprobs, 0.0)
    inference = torch.where(loss_mask, inference_logprobs.detach(), 0.0)
    log_ratio = trainer - inference
    return PolicyRatio(log_ratio=log_ratio, ratio=bounded(log_ratio).exp(), inference_kld=k3(log_ratio))


@uncompiled
def alignment_stats(
    trainer_logprobs: Tensor,
    inference_logprobs: Tensor,
    mask: Tensor,
    segments: Tensor,
    *,
    backend: str = backends.AUTO,
) -> Tensor:
    """Statistics of every segment: one row a segment, columns as in `STAT_COLUMNS`.

    `count` is the trained tokens of the segment, `num_compared` those finite on both sides, over which all
    else runs unless said otherwise; log_ratio = trainer - inference. Sums of log_ratio, of its
    absolute value and square, of k3, k3 capped at 1 nat a token, ratio and its square (the exponent clamped
    to +-20); `max_abs_log_ratio` (0 over no token) and `max_inference` (-inf over no token). `num_zeros`:
    inference exactly 0, trainer < -1e-3. `num_confident_disagreements`: inference >= ln 0.5, trainer more
    than 2 nats lower. `num_trainer_not_finite`, `num_inference_not_finite`: over all trained tokens.
    `residual_sum_k`, `residual_pairs_k` at each lag k of `LAGS`: over pairs (t, t + k), both trained and both
    in the segment, inference[t] and trainer[t + k] finite, of |inference[t] - trainer[t + k]|, at most
    RESIDUAL_CLIP.

    The last four columns are of windows of `WINDOW` tokens, counted from the segment's start.
    `first_num_compared` and `first_sum_abs_log_ratio`: of the first window. `max_window_residual`: the
    largest mean residual at lag 0 of a window, among those of at least `WINDOW_LEAST` nats; 0 where there is
    none. `max_window_lag_gain`: among the same the largest share of it that another lag saves, over pairs
    inside the window: 1 where a lag fits exactly, 0 where none fits better.

    A row of the table is the same to the bit whatever else the batch holds. Values under the mask change
    nothing. Segments may overlap: each is counted by itself. Sums are exact to 1e-6 of the sum of their
    terms' sizes; those of k3, ratio and its square to 3e-6 where |log_ratio| is above 8, since a float32
    log_ratio is itself rounded by up to 1e-6 there. All of this holds up to a |log_ratio| of 1e15; beyond, a
    sum may be infinite, that of squares first. On the torch backend they are float64. Segments on the host
    cost no device-to-host copy.

    Args:
        trainer_logprobs: [B, T] float32 or float64, nats.
        inference_logprobs: [B, T] float32 or float64, nats.
        mask: [B, T] bool, True = trained.
        segments: [G, 4] int32 or int64 (row, start, stop, turn), half-open; `turn` is not read. On the host
            or on the arguments' device.
        backend: `auto`, `c`, `triton` or `torch`.

    Returns:
        [G, len(STAT_COLUMNS)] float64 on the arguments' device, without gradient.

    Raises:
        ShapeError: shapes that differ, a segment outside [B, T].
        DtypeError: logprobs in half precision or not float, a mask that is not bool, devices that differ.
        BackendError: a backend asked for by name that cannot serve.

    Example:
        trainer [-1.0, -2.0], inference [-1.5, -2.0], both trained, segment (0, 0, 2, 0) -> count 2,
        sum_log_ratio 0.5, sum_k3 0.1487, residual_sum_0 0.5 over 2 pairs,
        residual_sum_1 |-1.5 - -2.0| = 0.5 over 1 pair
    """
    batch = (trainer_logprobs, inference_logprobs, mask)
    return _table(batch, _checked(*batch, segments), backend)


@uncompiled
def alignment_stats_and_ratio(
    trainer_logprobs: Tensor,
    inference_logprobs: Tensor,
    mask: Tensor,
    segments: Tensor,
    *,
    backend: str = backends.AUTO,
) -> AlignmentStats:
    """`alignment_stats`, and in the same pass the ratio of every token, without gradient.

    For consumers of the weights alone; a loss needs `policy_ratio`, whose ratio carries a gradient.

    Args:
        trainer_logprobs: as `alignment_stats`.
        inference_logprobs: as `alignment_stats`.
        mask: as `alignment_stats`.
        segments: as `alignment_stats`; a token in none of them has ratio 1.
        backend: as `alignment_stats`.

    Raises:
        ShapeError, DtypeError, BackendError: as `alignment_stats`.

    Example:
        trainer [-1.0, -2.0], inference [-1.5, -2.0], segment (0, 0, 2, 0) -> ratio [1.6487, 1.0]
    """
    batch = (trainer_logprobs, inference_logprobs, mask)
    host = _checked(*batch, segments)
    # Ones are right where no segment is: no pass beside the kernel's fills them in.
    out = torch.ones_like(trainer_logprobs, memory_format=torch.contiguous_format, requires_grad=False)
    table = _table(batch, host, backend, Written(out=out))
    return AlignmentStats(table=table, ratio=out)


@uncompiled
def alignment_stats_and_policy_gradient(
    trainer_logprobs: Tensor,
    inference_logprobs: Tensor,
    mask: Tensor,
    segments: Tensor,
    advantages: Tensor,
    *,
    loss: PolicyLoss,
    backend: str = backends.AUTO,
) -> PolicyGradient:
    """`alignment_stats`, and in the same pass the gradient of a policy loss to the trainer's logprobs.

    The gradient is that of the sum over tokens; divide it by the step's normaliser, and hand it to
    `trainer_logprobs.backward` once the table has been judged. What is not finite at a trained token gives
    NaN, but a trainer's logprob of -inf (a target outside its kept set) 0.

    Args:
        trainer_logprobs: as `alignment_stats`; the ratio is to the inference logprobs.
        inference_logprobs: as `alignment_stats`.
        mask: as `alignment_stats`.
        segments: as `alignment_stats`; a token in none of them has gradient 0.
        advantages: [B, T] in the dtype of trainer_logprobs; what else weighs a token, such as the length of
            its sequence, is multiplied into it. Anything where not trained.
        loss: which loss.
        backend: as `alignment_stats`.

    Raises:
        ShapeError, DtypeError, BackendError: as `alignment_stats`; advantages are held to the same.

    Example:
        trainer [-1.0, -2.0], inference [-1.5, -2.0], advantages [1.0, -1.0], segment (0, 0, 2, 0),
        PolicyLoss(kind="clip", low=0.8, high=1.2) -> ratios 1.6487 and 1, gradient [0.0, 1.0]
    """
    batch = (trainer_logprobs, inference_logprobs, mask)
    host = _checked(*batch, segments)
    require_tensor("advantages", advantages, (trainer_logprobs.dtype,))
    require_shape("advantages", advantages, trainer_logprobs.shape, "that of trainer_logprobs")
    require_device("advantages", advantages, trainer_logprobs.device, "trainer_logprobs")
    out = torch.zeros_like(trainer_logprobs, memory_format=torch.contiguous_format, requires_grad=False)
    written = Written(out=out, loss=require_loss(loss), advantages=advantages.detach().contiguous())
    table = _table(batch, host, backend, written)
    return PolicyGradient(table=table, gradient=out)


def count_outside(mask: Tensor, segments: Tensor) -> int:
    """How many trained positions are in no segment, and so in no row of the table.

    Args:
        mask: [B, T] bool on the host, True = trained.
        segments: as `alignment_stats`, on the host.

    Raises:
        ShapeError, DtypeError: as `alignment_stats`; a mask or segments that are not on the host.

    Example:
        mask [True, True, False, True], segment (0, 1, 3, 0) -> 2
    """
    require_tensor("mask", mask, (torch.bool,))
    if mask.dim() != 2:
        raise ShapeError(f"mask: found shape {list(mask.shape)}, expected [B, T]")
    host = _host_segments(segments, mask, "mask")
    require_device("mask", mask, host.device, "the host")
    if c_library.missing():
        return stats.count_outside(mask, host)
    return c_stats.count_outside(mask, host)


def _checked(trainer: Tensor, inference: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """The segments [G, 4] int64 on the host, once all arguments are in order."""
    _require_logprobs(trainer, inference, "mask", mask)
    if trainer.dim() != 2:
        raise ShapeError(f"trainer_logprobs: found shape {list(trainer.shape)}, expected [B, T]")
    return _host_segments(segments, trainer, "trainer_logprobs")


def _table(
    batch: tuple[Tensor, Tensor, Tensor], segments: Tensor, backend: str, written: Written | None = None
) -> Tensor:
    chosen = backends.choose("alignment_stats", backend, *batch[:2])
    with torch.no_grad():
        return chosen.segment_stats(*batch, segments, written)


def _require_logprobs(trainer: Tensor, inference: Tensor, mask_name: str, mask: Tensor) -> None:
    require_tensor("trainer_logprobs", trainer, LOGPROB_DTYPES)
    require_tensor("inference_logprobs", inference, LOGPROB_DTYPES)
    require_tensor(mask_name, mask, (torch.bool,))
    for name, value in (("inference_logprobs", inference), (mask_name, mask)):
        require_shape(name, value, trainer.shape, "that of trainer_logprobs")
        require_device(name, value, trainer.device, "trainer_logprobs")


def _host_segments(segments: Tensor, batch: Tensor, name: str) -> Tensor:
    """[G, 4] int64 on the host, each inside the batch [B, T], of which the argument `name` is."""
    require_tensor("segments", segments, SEGMENT_DTYPES)
    if segments.dim() != 2 or segments.shape[1] != 4:
        raise ShapeError(f"segments: found shape {list(segments.shape)}, expected [G, 4]")
    if segments.device.type != "cpu":
        require_device("segments", segments, batch.device, name)
    host = segments.to("cpu", torch.int64)
    row, start, stop = host[:, 0], host[:, 1], host[:, 2]
    num_rows, num_positions = batch.shape
    inside = (row >= 0) & (row < num_rows) & (start >= 0) & (start <= stop) & (stop <= num_positions)
    if not bool(inside.all()):
        outside = (~inside).nonzero()[:, 0].tolist()
        shown = ", ".join(
            f"{index}: {tuple(host[index].tolist())}" for index in outside[:MAX_OFFENDERS_SHOWN]
        )
        raise ShapeError(
            f"segments: found {len(outside)} outside the batch ({shown}), expected (row, start, stop, turn) "
            f"with 0 <= row < {num_rows} and 0 <= start <= stop <= {num_positions}"
        )
    return host
