"""The public ops: arguments are checked here, once, and handed to a backend.

There is one backend today, plain torch (`reference`, `linear`, `stats`), for every device. Another is chosen
here, after the checks, and must agree with it. Knows nothing of batches, records or verdicts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlbatch_kernels.arguments import (
    LOGIT_DTYPES,
    LOGPROB_DTYPES,
    MAX_OFFENDERS_SHOWN,
    SEGMENT_DTYPES,
    require_device,
    require_scale,
    require_shape,
    require_tensor,
    select_trained,
)
from rlbatch_kernels.errors import DtypeError, ShapeError
from rlbatch_kernels.kept_logprobs import KeptLinearLogprobs, KeptTokenLogprobs
from rlbatch_kernels.linear import LinearLogprobs, Scaling
from rlbatch_kernels.reference import TokenLogprobs, bounded, k3
from rlbatch_kernels.stats import segment_stats
from rlbatch_kernels.truncation import Kept, select_kept
from rlbatch_kernels.vocab_parallel import ShardedLinearLogprobs, ShardedTokenLogprobs, VocabGroup


class PolicyRatio(NamedTuple):
    """What `policy_ratio` returns: three tensors [B, T] that agree with each other."""

    log_ratio: Tensor
    """trainer - inference, nats; 0 where not trained. Never clamped."""
    ratio: Tensor
    """exp(log_ratio), its exponent clamped to +-20; 1 where not trained."""
    inference_kld: Tensor
    """k3 = ratio - 1 - log_ratio >= 0, nats; 0 where not trained."""


def token_logprobs(
    logits: Tensor,
    target_ids: Tensor,
    *,
    temperature: float | Tensor,
    mask: Tensor,
    kept: Kept | None = None,
    group: VocabGroup | None = None,
) -> Tensor:
    """Logprob of every trained target under softmax(logits / temperature).

    Exact to 5e-6 nats + 1 ulp against float64 given the same logits, up to +-1e4. Memory beyond the result is
    a few tiles of 16 MiB, and in the backward the gradient of the logits. Gradient reaches `logits` only;
    double backward is not supported. A trained row that holds NaN or +inf, or only -inf, gives NaN.

    Args:
        logits: [..., V] float16, bfloat16, float32 or float64; contiguous or not. -inf excludes a column.
        target_ids: [...] integer; 0 <= id < V where trained, anything elsewhere.
        temperature: a float, or [...] float; finite and above 0 where trained.
        mask: [...] bool, True = trained. Elsewhere the logprob is 0, without gradient, whatever the logits.
        kept: renormalise over a set of the vocabulary at each position (`Truncation`, `KeptIds`). A target
            outside its set has logprob -inf, without gradient.
        group: the ranks over which V is sharded; `logits` are this rank's own columns, all else is whole.
            See `rlbatch_kernels.vocab_parallel` for who reduces what. Not together with `kept`.

    Returns:
        [...] nats, float32 (float64 for float64 logits).

    Raises:
        ShapeError: shapes that differ, V = 0, a freed tensor.
        DtypeError: a dtype, device or kind of tensor that is not taken (DTensor, meta, fake, sparse).
        ScaleError: a temperature that is not finite and above 0 at a trained position, or a rule of `kept`
            that is out of range.
        TokenRangeError: a trained id outside [0, V); names the first positions and ids.
        GroupError: targets or temperatures that differ between the ranks of `group`.
        NotImplementedError: `kept` together with `group`.

    Example:
        logits [0, ln 3], target 1, temperature 1 -> ln(3/4) = -0.2877; temperature 0.5 -> ln(9/10) = -0.1054;
        logits [0, ln 3, ln 4], target 1, kept=Truncation(top_k=2) -> ln(3/7) = -0.8473, target 0 -> -inf
    """
    require_tensor("logits", logits, LOGIT_DTYPES)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ShapeError(f"logits: found shape {list(logits.shape)}, expected [..., V] with V at least 1")
    vocab_size = _vocab_size("logits", logits.shape[-1], kept, group)
    trained = select_trained(target_ids, mask, temperature, vocab_size=vocab_size, like=("logits", logits))
    logprobs: Tensor
    if kept is not None:
        sets = select_kept(kept, trained, vocab_size=vocab_size, like=("logits", logits))
        logprobs = KeptTokenLogprobs.apply(logits, trained, sets)  # type: ignore[no-untyped-call]
    elif group is not None:
        logprobs = ShardedTokenLogprobs.apply(logits, trained, group)  # type: ignore[no-untyped-call]
    else:
        logprobs = TokenLogprobs.apply(logits, trained)  # type: ignore[no-untyped-call]
    return logprobs


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    *,
    temperature: float | Tensor,
    mask: Tensor,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    kept: Kept | None = None,
    group: VocabGroup | None = None,
) -> Tensor:
    """Logprob of every trained target from hidden states and the lm_head, without logits [T, V].

    logits = cap((hidden @ weight.T + bias) * logit_scale), cap(z) = soft_cap * tanh(z / soft_cap); then as
    `token_logprobs`. Logits are float32 even for half-precision arguments (see `rlbatch_kernels.linear`).
    Only trained rows enter the product. Gradients reach hidden, weight and bias; double backward is not
    supported. A non-finite logit gives NaN, but a soft cap maps +-inf to +-soft_cap, as the model does.

    Args:
        hidden: [..., D] float16, bfloat16, float32 or float64; after the final norm.
        weight: [V, D]; may differ from hidden in precision, but float64 goes with float64 only.
        target_ids: [...] integer; 0 <= id < V where trained, anything elsewhere.
        temperature: a float, or [...] float; finite and above 0 where trained.
        mask: [...] bool, True = trained. Elsewhere the logprob is 0 without gradient, whatever hidden holds.
        bias: [V] of the head, or None.
        logit_scale: multiplies the logits (Cohere: `logit_scale`; Granite: 1 / `logits_scaling`).
        soft_cap: Gemma 2's `final_logit_softcapping`, or None.
        kept: as for `token_logprobs`; logits of 64 tokens then exist for all columns at once.
        group: as for `token_logprobs`; weight and bias are this rank's own rows of the head. The backward
            sums the gradient of hidden over the ranks itself.

    Returns:
        [...] nats, float32 (float64 for float64 arguments).

    Raises:
        ShapeError: shapes that differ, a weight that is empty or freed.
        DtypeError: a dtype, device or kind of tensor that is not taken (DTensor, meta, fake, sparse).
        ScaleError: temperature (at a trained position), logit_scale or soft_cap not finite and above 0, or a
            rule of `kept` out of range.
        TokenRangeError: a trained id outside [0, V); names the first positions and ids.
        GroupError: targets or temperatures that differ between the ranks of `group`.
        NotImplementedError: `kept` together with `group`.

    Example:
        hidden [1], weight [[0], [ln 3]], target 1 -> ln(3/4) = -0.2877; logit_scale 2 -> ln(9/10) = -0.1054
    """
    _require_head(hidden, weight, bias)
    scaling = Scaling(
        logit_scale=require_scale("logit_scale", logit_scale),
        soft_cap=None if soft_cap is None else require_scale("soft_cap", soft_cap),
    )
    vocab_size = _vocab_size("weight", weight.shape[0], kept, group)
    trained = select_trained(target_ids, mask, temperature, vocab_size=vocab_size, like=("hidden", hidden))
    arguments = (hidden, weight, bias, trained, scaling)
    logprobs: Tensor
    if kept is not None:
        sets = select_kept(kept, trained, vocab_size=vocab_size, like=("hidden", hidden))
        logprobs = KeptLinearLogprobs.apply(*arguments, sets)  # type: ignore[no-untyped-call]
    elif group is not None:
        logprobs = ShardedLinearLogprobs.apply(*arguments, group)  # type: ignore[no-untyped-call]
    else:
        logprobs = LinearLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]
    return logprobs


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


def alignment_stats(
    trainer_logprobs: Tensor, inference_logprobs: Tensor, mask: Tensor, segments: Tensor
) -> Tensor:
    """Statistics of every segment: one row a segment, columns as in `STAT_COLUMNS`.

    `count` is the trained tokens of the segment, `num_compared` those finite on both sides, over which all
    else runs unless said otherwise; log_ratio = trainer - inference, in float64. Sums of log_ratio, of its
    absolute value and square, of k3, k3 capped at 1 nat a token, ratio and its square (the exponent clamped
    to +-20); `max_abs_log_ratio` (0 over no token) and `max_inference` (-inf over no token). `num_zeros`:
    inference exactly 0, trainer < -1e-3. `num_confident_disagreements`: inference >= ln 0.5, trainer more
    than 2 nats lower. `num_trainer_not_finite`, `num_inference_not_finite`: over all trained tokens.
    `residual_sum_k`, `residual_pairs_k` at each lag k of `LAGS`: over pairs (t, t + k), both trained and both
    in the segment, inference[t] and trainer[t + k] finite, of |inference[t] - trainer[t + k]|, at most
    RESIDUAL_CLIP.

    A row of the table is the same to the bit whatever else the batch holds. Values under the mask change
    nothing. Segments may overlap: each is counted by itself. One device-to-host copy, of the segments.

    Args:
        trainer_logprobs: [B, T] float32 or float64, nats.
        inference_logprobs: [B, T] float32 or float64, nats.
        mask: [B, T] bool, True = trained.
        segments: [G, 4] int32 or int64 (row, start, stop, turn), half-open; `turn` is not read.

    Returns:
        [G, len(STAT_COLUMNS)] float64 on the arguments' device, without gradient.

    Raises:
        ShapeError: shapes that differ, a segment outside [B, T].
        DtypeError: logprobs in half precision or not float, a mask that is not bool, devices that differ.

    Example:
        trainer [-1.0, -2.0], inference [-1.5, -2.0], both trained, segment (0, 0, 2, 0) -> count 2,
        sum_log_ratio 0.5, sum_k3 0.1487, residual_sum_0 0.5 over 2 pairs,
        residual_sum_1 |-1.5 - -2.0| = 0.5 over 1 pair
    """
    _require_logprobs(trainer_logprobs, inference_logprobs, "mask", mask)
    if trainer_logprobs.dim() != 2:
        raise ShapeError(f"trainer_logprobs: found shape {list(trainer_logprobs.shape)}, expected [B, T]")
    lengths = _segment_lengths(segments, trainer_logprobs)
    with torch.no_grad():
        return segment_stats(trainer_logprobs, inference_logprobs, mask, segments, lengths)


def _vocab_size(name: str, num_columns: int, kept: Kept | None, group: VocabGroup | None) -> int:
    """V, of which the argument `name` has `num_columns`."""
    if group is None:
        return num_columns
    if kept is not None:
        raise NotImplementedError(
            "kept: a kept set over a sharded vocabulary is not supported; gather the logits"
        )
    group.require_own(name, num_columns)
    return group.vocab_size


def _require_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    require_tensor("hidden", hidden, LOGIT_DTYPES)
    require_tensor("weight", weight, LOGIT_DTYPES)
    if weight.dim() != 2 or weight.numel() == 0:
        raise ShapeError(
            f"weight: found shape {list(weight.shape)}, expected [V, D] with data "
            "(a sharded parameter is empty outside its module's forward)"
        )
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"hidden: found shape {list(hidden.shape)}, expected [..., {weight.shape[1]}] (D of weight)"
        )
    head = [("weight", weight)]
    if bias is not None:
        require_tensor("bias", bias, LOGIT_DTYPES)
        require_shape("bias", bias, (weight.shape[0],), "V of weight")
        head.append(("bias", bias))
    for name, value in head:
        require_device(name, value, hidden.device, "hidden")
        if (value.dtype == torch.float64) != (hidden.dtype == torch.float64):
            raise DtypeError(
                f"{name}: found {value.dtype} with hidden in {hidden.dtype}, expected float64 for all or none"
            )


def _require_logprobs(trainer: Tensor, inference: Tensor, mask_name: str, mask: Tensor) -> None:
    require_tensor("trainer_logprobs", trainer, LOGPROB_DTYPES)
    require_tensor("inference_logprobs", inference, LOGPROB_DTYPES)
    require_tensor(mask_name, mask, (torch.bool,))
    for name, value in (("inference_logprobs", inference), (mask_name, mask)):
        require_shape(name, value, trainer.shape, "that of trainer_logprobs")
        require_device(name, value, trainer.device, "trainer_logprobs")


def _segment_lengths(segments: Tensor, trainer: Tensor) -> list[int]:
    require_tensor("segments", segments, SEGMENT_DTYPES)
    if segments.dim() != 2 or segments.shape[1] != 4:
        raise ShapeError(f"segments: found shape {list(segments.shape)}, expected [G, 4]")
    require_device("segments", segments, trainer.device, "trainer_logprobs")
    host = segments.to("cpu", torch.int64)
    row, start, stop = host[:, 0], host[:, 1], host[:, 2]
    num_rows, num_positions = trainer.shape
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
    lengths: list[int] = (stop - start).tolist()
    return lengths
