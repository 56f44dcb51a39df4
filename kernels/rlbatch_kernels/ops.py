"""The public ops over logits: arguments are checked here, once, and handed to a backend.

Knows nothing of batches, records or verdicts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlbatch_kernels import backends
from rlbatch_kernels.arguments import (
    LOGIT_DTYPES,
    Trained,
    may_overlap,
    require_head,
    require_scale,
    require_tensor,
    require_vocab_mask,
    select_trained,
)
from rlbatch_kernels.errors import DtypeError, ShapeError
from rlbatch_kernels.linear import LinearLogprobs
from rlbatch_kernels.logprobs import Plan, RowStatistics
from rlbatch_kernels.reference import compute_dtype
from rlbatch_kernels.shaping import Shaping
from rlbatch_kernels.truncation import Kept, select_kept
from rlbatch_kernels.uncompiled import uncompiled
from rlbatch_kernels.vocab_parallel import Shard, VocabGroup
from rlbatch_kernels.vocabulary import Vocabulary

ROUNDED_DTYPES = (torch.float32, torch.bfloat16)
"""What `linear_logprobs` can be asked to hold logits in."""


class TokenStatistics(NamedTuple):
    """What `token_statistics` returns: four tensors [...]; 0 where not trained."""

    logprobs: Tensor
    """Nats, of the target."""
    log_sum_exp: Tensor
    """log of the sum of exp(logit / temperature) over the vocabulary."""
    entropy: Tensor
    """Nats, of softmax(logits / temperature)."""
    rank: Tensor
    """int64: 1 + the number of columns with a larger logit than the target's; 1 = the most likely one."""


@uncompiled
def token_logprobs(
    logits: Tensor,
    target_ids: Tensor,
    *,
    temperature: float | Tensor,
    mask: Tensor,
    soft_cap: float | None = None,
    vocab_mask: Tensor | int | None = None,
    in_place_backward: bool = False,
    backend: str = backends.AUTO,
    kept: Kept | None = None,
    group: VocabGroup | None = None,
) -> Tensor:
    """Logprob of every trained target under softmax(logits / temperature).

    Exact to 5e-6 nats + 1 ulp against float64 given the same logits, up to +-1e4. Memory beyond the result is
    at most a few tiles of 8 MiB, and in the backward the gradient of the logits. Gradient reaches `logits`
    only; double backward is not supported. A trained row that holds NaN or +inf, or only -inf, gives NaN.

    Args:
        logits: [..., V] float16, bfloat16, float32 or float64; contiguous or not. -inf excludes a column.
        target_ids: [...] integer; 0 <= id < V where trained, anything elsewhere.
        temperature: a float, or [...] float; finite and above 0 where trained.
        mask: [...] bool, True = trained. Elsewhere the logprob is 0, without gradient, whatever the logits.
        soft_cap: logits become cap * tanh(logits / cap) first; None = as they are.
        vocab_mask: [V] bool; False excludes a column, as a logit of -inf does. Or the number of ids: columns
            from it on, which a head has to be of an even size, are excluded. None = every column counts.
        in_place_backward: the backward writes the gradient over the logits, which must then be no leaf and
            not expanded, and which nothing else may have kept for its own backward (torch raises where
            something has).
        backend: `auto`, `c`, `triton` or `torch`; see `last_backend`.
        kept: renormalise over a set of the vocabulary at each position (`Truncation`, `KeptIds`). A target
            outside its set has logprob -inf, without gradient.
        group: the ranks over which V is sharded; `logits` are this rank's own columns, all else is whole,
            `vocab_mask` too. See `rlbatch_kernels.vocab_parallel` for who reduces what. Not with `kept`.

    Returns:
        [...] nats, float32 (float64 for float64 logits).

    Raises:
        ShapeError: shapes that differ, V = 0, a freed tensor.
        DtypeError: a dtype, device or kind of tensor that is not taken (DTensor, meta, fake, sparse).
        ScaleError: a temperature that is not finite and above 0 at a trained position, or a rule of `kept`
            that is out of range.
        TokenRangeError: a trained id outside [0, V), or one that `vocab_mask` excludes; names the first
            positions and ids.
        BackendError: a backend asked for by name that cannot serve.
        GroupError: masks, targets or temperatures that differ between the ranks of `group`.
        NotImplementedError: `kept` together with `group`.

    Example:
        logits [0, ln 3], target 1, temperature 1 -> ln(3/4) = -0.2877; temperature 0.5 -> ln(9/10) = -0.1054;
        logits [0, ln 3, ln 4], target 1, kept=Truncation(top_k=2) -> ln(3/7) = -0.8473, target 0 -> -inf
    """
    arguments = (logits, target_ids, temperature, mask)
    changes = (soft_cap, vocab_mask)
    trained, plan = _plan("token_logprobs", arguments, changes, in_place_backward, backend, kept, group)
    logprobs: Tensor
    (logprobs,) = RowStatistics.apply(logits, trained, plan, False, in_place_backward)  # type: ignore[no-untyped-call]
    return logprobs


@uncompiled
def token_statistics(
    logits: Tensor,
    target_ids: Tensor,
    *,
    temperature: float | Tensor,
    mask: Tensor,
    soft_cap: float | None = None,
    vocab_mask: Tensor | int | None = None,
    in_place_backward: bool = False,
    backend: str = backends.AUTO,
) -> TokenStatistics:
    """`token_logprobs`, and in the same pass log-sum-exp, entropy and the target's rank.

    Gradient reaches `logits` from logprobs, log_sum_exp and entropy. Where the logprob is NaN so are
    log_sum_exp and entropy, and the rank says nothing.

    Args:
        logits: as `token_logprobs`, like all other arguments.
        target_ids: [...] integer.
        temperature: a float, or [...] float.
        mask: [...] bool, True = trained.
        soft_cap: a float or None.
        vocab_mask: [V] bool, a number of ids, or None.
        in_place_backward: whether the gradient is written over the logits.
        backend: `auto`, `c`, `triton` or `torch`.

    Raises:
        ShapeError, DtypeError, ScaleError, TokenRangeError, BackendError: as `token_logprobs`.

    Example:
        logits [0, ln 3], target 0, temperature 1 -> logprob ln(1/4) = -1.3863, log_sum_exp ln 4 = 1.3863,
        entropy ln 4 - 3/4 ln 3 = 0.5623, rank 2
    """
    arguments = (logits, target_ids, temperature, mask)
    changes = (soft_cap, vocab_mask)
    trained, plan = _plan("token_statistics", arguments, changes, in_place_backward, backend)
    found = RowStatistics.apply(logits, trained, plan, True, in_place_backward)  # type: ignore[no-untyped-call]
    return TokenStatistics(*found)


@uncompiled
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
    vocab_mask: Tensor | int | None = None,
    logits_dtype: torch.dtype | None = None,
    backend: str = backends.AUTO,
    kept: Kept | None = None,
    group: VocabGroup | None = None,
) -> Tensor:
    """Logprob of every trained target from hidden states and the lm_head, without logits [T, V].

    logits = cap((hidden @ weight.T + bias) * logit_scale), cap(z) = soft_cap * tanh(z / soft_cap); then as
    `token_logprobs`. Logits are float32 even for half-precision arguments (see `rlbatch_kernels.linear`).
    Only trained rows enter the product. A token's logprob is the same to the bit whatever else the batch
    holds. Gradients reach hidden, weight and bias; double backward is not supported. A non-finite logit gives
    NaN, but a soft cap maps +-inf to +-soft_cap, as the model does.

    Args:
        hidden: [..., D] float16, bfloat16, float32 or float64; after the final norm.
        weight: [V, D]; may differ from hidden in precision, but float64 goes with float64 only.
        target_ids: [...] integer; 0 <= id < V where trained, anything elsewhere.
        temperature: a float, or [...] float; finite and above 0 where trained.
        mask: [...] bool, True = trained. Elsewhere the logprob is 0 without gradient, whatever hidden holds.
        bias: [V] of the head, or None.
        logit_scale: multiplies the logits (Cohere: `logit_scale`; Granite: 1 / `logits_scaling`).
        soft_cap: Gemma 2's `final_logit_softcapping`, or None.
        vocab_mask: as for `token_logprobs`.
        logits_dtype: float32 is exact, whatever `torch.set_float32_matmul_precision` allows; bfloat16 rounds
            logits as an engine or trainer with a bfloat16 head does, for bfloat16 arguments by a bfloat16
            GEMM. None = float32 (float64 for float64 arguments).
        backend: `auto`, `c`, `triton` or `torch`: of the softmax; the products are the vendor library's.
        kept: as for `token_logprobs`; with a `Truncation` logits of 64 tokens exist for all columns at once.
        group: as for `token_logprobs`; weight and bias are this rank's own rows of the head. The backward
            sums the gradient of hidden over the ranks itself.

    Returns:
        [...] nats, float32 (float64 for float64 arguments).

    Raises:
        ShapeError: shapes that differ, a weight that is empty or freed.
        DtypeError: a dtype, device or kind of tensor that is not taken (DTensor, meta, fake, sparse).
        ScaleError: temperature (at a trained position), logit_scale or soft_cap not finite and above 0, or a
            rule of `kept` out of range.
        TokenRangeError: a trained id outside [0, V), or one that `vocab_mask` excludes; names the first
            positions and ids.
        GroupError: masks, targets or temperatures that differ between the ranks of `group`.
        NotImplementedError: `kept` together with `group`.

    Example:
        hidden [1], weight [[0], [ln 3]], target 1 -> ln(3/4) = -0.2877; logit_scale 2 -> ln(9/10) = -0.1054
    """
    require_head(hidden, weight, bias)
    rounded = _logits_dtype(logits_dtype, compute_dtype(hidden, weight))
    vocab_size = _vocab_size("weight", weight.shape[0], kept, group)
    like = ("hidden", hidden)
    shaping = _shaping(logit_scale, soft_cap, require_vocab_mask(vocab_mask, vocab_size, like))
    trained = select_trained(
        target_ids, mask, temperature, vocab_size=vocab_size, vocab_mask=shaping.vocab_mask, like=like
    )
    plan = Plan(
        softmax=backends.choose("linear_logprobs", backend, hidden, weight).softmax,
        shaping=shaping,
        vocabulary=_vocabulary(kept, group, trained, vocab_size, like),
        rounds_logits=rounded == torch.bfloat16,
    )
    logprobs: Tensor = LinearLogprobs.apply(hidden, weight, bias, trained, plan, rounded)  # type: ignore[no-untyped-call]
    return logprobs


def _plan(
    op: str,
    arguments: tuple[Tensor, Tensor, float | Tensor, Tensor],
    changes: tuple[float | None, Tensor | int | None],
    in_place: bool,
    backend: str,
    kept: Kept | None = None,
    group: VocabGroup | None = None,
) -> tuple[Trained, Plan]:
    logits, target_ids, temperature, mask = arguments
    require_tensor("logits", logits, LOGIT_DTYPES)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ShapeError(f"logits: found shape {list(logits.shape)}, expected [..., V] with V at least 1")
    if in_place and logits.is_leaf and logits.requires_grad:
        raise DtypeError(
            "logits: found a leaf that requires grad with in_place_backward=True, expected the output of a "
            "model: a leaf's own values would be lost"
        )
    if in_place and may_overlap(logits):
        raise DtypeError(
            f"logits: found shape {list(logits.shape)} with strides {list(logits.stride())} and "
            "in_place_backward=True, expected every element in a place of its own (not expanded): "
            "gradients of elements that share one would overwrite each other"
        )
    vocab_size = _vocab_size("logits", logits.shape[-1], kept, group)
    like = ("logits", logits)
    soft_cap, vocab_mask = changes
    shaping = _shaping(1.0, soft_cap, require_vocab_mask(vocab_mask, vocab_size, like))
    trained = select_trained(
        target_ids, mask, temperature, vocab_size=vocab_size, vocab_mask=shaping.vocab_mask, like=like
    )
    vocabulary = _vocabulary(kept, group, trained, vocab_size, like)
    softmax = backends.choose(op, backend, logits).softmax
    return trained, Plan(softmax=softmax, shaping=shaping, vocabulary=vocabulary)


def _vocabulary(
    kept: Kept | None,
    group: VocabGroup | None,
    trained: Trained,
    vocab_size: int,
    like: tuple[str, Tensor],
) -> Vocabulary:
    if kept is not None:
        return select_kept(kept, trained, vocab_size=vocab_size, like=like)
    return Vocabulary() if group is None else Shard(group)


def _vocab_size(name: str, num_columns: int, kept: Kept | None, group: VocabGroup | None) -> int:
    """V, of which the argument `name` has `num_columns`."""
    if kept is not None and group is not None:
        raise NotImplementedError(
            "kept: a kept set over a sharded vocabulary is not supported; gather the logits"
        )
    if group is None:
        return num_columns
    group.require_own(name, num_columns)
    return group.vocab_size


def _shaping(logit_scale: object, soft_cap: object, vocab_mask: Tensor | None) -> Shaping:
    return Shaping(
        logit_scale=require_scale("logit_scale", logit_scale),
        soft_cap=None if soft_cap is None else require_scale("soft_cap", soft_cap),
        vocab_mask=vocab_mask,
    )


def _logits_dtype(asked: torch.dtype | None, computed: torch.dtype) -> torch.dtype:
    if asked is None:
        return computed
    if asked not in ROUNDED_DTYPES or computed == torch.float64:
        expected = "None" if computed == torch.float64 else "None, torch.float32 or torch.bfloat16"
        raise DtypeError(f"logits_dtype: found {asked!r} for {computed} logits, expected {expected}")
    return asked
