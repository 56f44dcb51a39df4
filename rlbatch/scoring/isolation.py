"""Proof, once a model, that packed sequences are scored as if each were alone.

Two measurements over three short sequences: packed against each alone, and packed against packed with the
first sequence exchanged, which must not move the others. The second compares two calls of the same shape, so
that it is sharp in low precision too, where rounding drowns the first; its measure is how far the same
exchange moves them where all three are one sequence. Knows nothing of the head: it uses plain logits.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlbatch.catalogue import finding
from rlbatch.errors import PackingLeakError
from rlbatch.records import Sample
from rlbatch.scoring.inputs import model_inputs
from rlbatch.scoring.model import input_weight, model_vocab_size
from rlbatch.scoring.probe import computing_dtypes, joined, probe_batch, probe_sample, quiet
from rlbatch.scoring.transforms import model_name
from rlbatch_kernels import token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTHS = (11, 7, 9)
"""Unequal, so that a boundary computed from a wrong length shows; the first is the one exchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """Nats that rounding may do in one dtype, at least three times what was seen on sound models."""

    apart: float
    moved: float


# float32 leaves room for TF32. Attention across boundaries moves a trained model by several nats.
_LIMITS: dict[torch.dtype, _Limits] = {
    torch.float64: _Limits(apart=0.005, moved=0.001),
    torch.float32: _Limits(apart=0.005, moved=0.001),
    torch.float16: _Limits(apart=0.05, moved=0.05),
    torch.bfloat16: _Limits(apart=0.2, moved=0.2),
}
_SHARE = 0.1
"""Of `in_context`: a leak moves tokens about as much, and rounding in experts by under a hundredth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Nats over the tokens of three sequences."""

    apart: float
    """Mean |difference| of packed and alone: other shapes, so other kernels and another order of sums."""
    moved: float
    """Largest |difference| after the exchange: 0, but for experts that then get other rows to compute."""
    in_context: float
    """The same with all three in one sequence, where the exchange must show."""
    dtype: torch.dtype
    """The coarsest that the model computes in."""


_PROVEN: "weakref.WeakKeyDictionary[nn.Module, set[_Form]]" = weakref.WeakKeyDictionary()
"""Model -> the forms in which it was proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What decides which kernels a model attends with."""

    attention: str
    dtype: torch.dtype
    device: str


def require_packing_isolated(model: "PreTrainedModel") -> None:
    """Pass a model that scores packed sequences as if each were alone; proven once.

    Once for each attention implementation, dtype and kind of device: seven forwards over at most 27 tokens,
    in eval mode, in which all ranks of a sharded model take part.

    Args:
        model: called as `model(**model_inputs(batch))`.

    Raises:
        PackingLeakError: it does not.
    """
    weight = input_weight(model)
    form = _Form(
        attention=str(model.config.get_text_config()._attn_implementation),
        dtype=weight.dtype,
        device=weight.device.type,
    )
    if form in _PROVEN.get(model, ()):
        return
    measured = _measure(model)
    limits = _LIMITS.get(measured.dtype, _LIMITS[torch.bfloat16])
    may_move = min(limits.moved, _SHARE * measured.in_context)
    # Written so that NaN is refused too.
    if not (measured.apart <= limits.apart and measured.moved <= may_move):
        raise PackingLeakError.of(
            finding(
                "packing-leak",
                expected=f"from {model_name(model)} ({form.attention}, {measured.dtype}): packed and alone "
                f"within {limits.apart} nats in the mean, and no token moved by more than {may_move:.2g} "
                "when the sequence before it is exchanged",
                found=f"{measured.apart:.3g} apart in the mean, moved by up to {measured.moved:.3g}",
            )
        )
    _PROVEN.setdefault(model, set()).add(form)


def _measure(model: "PreTrainedModel") -> _Measured:
    vocab_size = model_vocab_size(model)
    samples = [probe_sample(length, seed=seed, vocab_size=vocab_size) for seed, length in enumerate(_LENGTHS)]
    other = probe_sample(_LENGTHS[0], seed=len(_LENGTHS), vocab_size=vocab_size)
    changed = [other, *samples[1:]]
    with quiet(model), computing_dtypes(model) as dtypes:
        packed = _logprobs(model, samples)
        alone = torch.cat([_logprobs(model, [sample]) for sample in samples], dim=1)
        exchanged = _logprobs(model, changed)
        in_context = _logprobs(model, [joined(samples)]) - _logprobs(model, [joined(changed)])
    return _Measured(
        apart=float((packed - alone).abs().mean()),
        moved=float((packed - exchanged)[:, _LENGTHS[0] :].abs().max()),
        in_context=float(in_context[:, _LENGTHS[0] :].abs().max()),
        dtype=max(dtypes, key=lambda dtype: torch.finfo(dtype).eps),
    )


def _logprobs(model: "PreTrainedModel", samples: Sequence[Sample]) -> Tensor:
    """[1, T] float32 from plain logits of the samples in one packed row."""
    batch = probe_batch(samples, layout="packed", model=model)
    logits = model(**model_inputs(batch)).logits
    return token_logprobs(logits, batch.target_ids, temperature=batch.temperature, mask=batch.loss_mask)
