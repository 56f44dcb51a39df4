"""Proof, once a model, that sequences are scored as if each were alone: packed ones, and ones behind padding.

Two measurements over short sequences: together against each alone, and against what is in front of them (the
first sequence of a pack, or the padding) exchanged, which must not move them. The second compares two calls
of the same shape, so that it is sharp in low precision too, where rounding drowns the first; its measure is
how far the same exchange moves them where all is one sequence. Plain logits; knows nothing of the head.
"""

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlbatch.batch import Batch, Layout
from rlbatch.catalogue import finding
from rlbatch.collate import DEFAULT_PADDING, Padding
from rlbatch.errors import Finding, PackingLeakError, ScoringError
from rlbatch.records import Sample
from rlbatch.scoring.inputs import model_inputs
from rlbatch.scoring.model import input_weight, model_vocab_size
from rlbatch.scoring.probe import computing_dtypes, joined, probe_batch, probe_sample, quiet, repeated_sample
from rlbatch.scoring.wrappers import call_hooks, model_name, unwrapped
from rlbatch_kernels import token_logprobs

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
    """Nats over the tokens of the short sequences."""

    apart: float
    """Mean |difference| of together and alone: other shapes, so other kernels and another order of sums."""
    moved: float
    """Largest |difference| after the exchange: 0, but for experts that then get other rows to compute."""
    in_context: float
    """The same with all in one sequence, where the exchange must show."""
    dtype: torch.dtype
    """The coarsest that the model computes in."""

    @classmethod
    def of(
        cls, apart: Tensor, moved: Tensor, in_context: Tensor, dtypes: Collection[torch.dtype]
    ) -> "_Measured":
        """From the differences themselves, [B, T] nats."""
        return cls(
            apart=float(apart.abs().mean()),
            moved=float(moved.abs().max()),
            in_context=float(in_context.abs().max()),
            dtype=max(dtypes, key=lambda dtype: torch.finfo(dtype).eps),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What decides which kernels a model attends with, and what else its call runs."""

    layout: Layout
    attention: str
    dtype: torch.dtype
    device: str
    hooks: tuple[object, ...]


_KNOWN: "weakref.WeakKeyDictionary[nn.Module, dict[_Form, Finding | None]]" = weakref.WeakKeyDictionary()
"""Model as it is called -> the forms that were measured, and what is wrong in each."""
_WORDS: dict[Layout, tuple[str, str]] = {
    "packed": ("packing-leak", "sequence"),
    "padded": ("padding-leak", "padding"),
}
"""The code of a leak, and what leaks."""


def require_packing_isolated(model: nn.Module) -> None:
    """Pass a model that scores packed sequences as if each were alone; proven once.

    Once for each attention implementation, dtype and kind of device: seven forwards over at most 27 tokens,
    in eval mode, in which all ranks of a sharded or DistributedDataParallel model take part.

    Args:
        model: called as `model(**model_inputs(batch))`.

    Raises:
        PackingLeakError: it does not.
    """
    leak = _leak(model, "packed")
    if leak is not None:
        _forget(model)
        raise PackingLeakError.of(leak)


def require_padding_ignored(model: nn.Module, batch: Batch) -> None:
    """Pass a model that scores a sequence behind padding as if it were alone; proven once.

    Once as for packing: five forwards over at most two rows of 11 tokens. Every padded batch asks for the
    proof, since all ranks have to take part and each knows only its own rows; but only a batch with padding
    in front of a sequence is refused.

    Args:
        model: called as `model(**model_inputs(batch))`.
        batch: padded.

    Raises:
        ScoringError: it does not, and the batch has padding on the left.
    """
    leak = _leak(model, "padded")
    if leak is not None and any(ref.token_offset for ref in batch.refs):
        _forget(model)
        raise ScoringError.of(leak)


def _leak(model: nn.Module, layout: Layout) -> Finding | None:
    """How sequences of the layout leak in the form that the model has now; measured once."""
    weight = input_weight(model)
    config: Any = unwrapped(model).config
    form = _Form(
        layout=layout,
        attention=str(config.get_text_config()._attn_implementation),
        dtype=weight.dtype,
        device=weight.device.type,
        hooks=call_hooks(model),
    )
    known = _KNOWN.setdefault(model, {})
    if form not in known:
        measured = _measure_packing(model) if layout == "packed" else _measure_padding(model)
        known[form] = _judge(measured, form, model_name(model))
    return known[form]


def _forget(model: nn.Module) -> None:
    """What was refused is measured again: the model may have been mended."""
    del _KNOWN[model]


def _judge(measured: _Measured, form: _Form, name: str) -> Finding | None:
    limits = _LIMITS.get(measured.dtype, _LIMITS[torch.bfloat16])
    may_move = min(limits.moved, _SHARE * measured.in_context)
    # Written so that NaN is refused too.
    if measured.apart <= limits.apart and measured.moved <= may_move:
        return None
    code, before = _WORDS[form.layout]
    return finding(
        code,
        expected=f"from {name} ({form.attention}, {measured.dtype}): {form.layout} and alone within "
        f"{limits.apart} nats in the mean, and no token moved by more than {may_move:.2g} "
        f"when the {before} before it is exchanged",
        found=f"{measured.apart:.3g} apart in the mean, moved by up to {measured.moved:.3g}",
    )


def _measure_packing(model: nn.Module) -> _Measured:
    vocab_size = model_vocab_size(model)
    samples = [probe_sample(length, seed=seed, vocab_size=vocab_size) for seed, length in enumerate(_LENGTHS)]
    other = probe_sample(_LENGTHS[0], seed=len(_LENGTHS), vocab_size=vocab_size)
    changed = [other, *samples[1:]]
    behind = slice(_LENGTHS[0], None)
    with quiet(model), computing_dtypes(model) as dtypes:
        packed = _logprobs(model, samples, "packed")
        alone = torch.cat([_logprobs(model, [sample], "packed") for sample in samples], dim=1)
        exchanged = _logprobs(model, changed, "packed")
        in_context = _logprobs(model, [joined(samples)], "packed") - _logprobs(
            model, [joined(changed)], "packed"
        )
    return _Measured.of(packed - alone, (packed - exchanged)[:, behind], in_context[:, behind], dtypes)


def _measure_padding(model: nn.Module) -> _Measured:
    vocab_size = model_vocab_size(model)
    longest, shortest = max(_LENGTHS), min(_LENGTHS)
    rows = [
        probe_sample(length, seed=seed, vocab_size=vocab_size)
        for seed, length in enumerate((shortest, longest))
    ]
    behind = slice(longest - shortest, None)
    # The same in one sequence with what pads it.
    in_front = [repeated_sample(behind.start, token_id=token_id) for token_id in (0, vocab_size // 2)]
    with quiet(model), computing_dtypes(model) as dtypes:
        padded, exchanged = (
            _logprobs(model, rows, "padded", Padding(side="left", token_id=int(part.token_ids[0])))[
                :1, behind
            ]
            for part in in_front
        )
        alone = _logprobs(model, rows[:1], "padded")
        joined_with = [_logprobs(model, [joined([part, rows[0]])], "padded")[:, behind] for part in in_front]
    return _Measured.of(padded - alone, padded - exchanged, joined_with[0] - joined_with[1], dtypes)


def _logprobs(
    model: nn.Module, samples: Sequence[Sample], layout: Layout, padding: Padding = DEFAULT_PADDING
) -> Tensor:
    """[B, T] float32 from plain logits of the samples in one batch."""
    batch = probe_batch(samples, layout=layout, model=model, padding=padding)
    logits = model(**model_inputs(batch)).logits
    return token_logprobs(logits, batch.target_ids, temperature=batch.temperature, mask=batch.loss_mask)
