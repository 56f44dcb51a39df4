"""Proof, once a model, that its logits are its head's output under the transform known for it.

Four forwards over one short row: plain logits, then three checks. The first two replace the head's output by
made-up values of a wide range, so that a soft-cap is seen even on a model whose own logits are still near 0;
they check the whole path behind the head. The third compares logprobs of the real head with those of plain
logits. All ranks of a sharded model take part.
"""

import weakref
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.errors import ScoringError
from rlbatch.scoring.head import logprob_forward, output_head, overridden, same_dtype_required
from rlbatch.scoring.inputs import model_inputs
from rlbatch.scoring.model import model_vocab_size
from rlbatch.scoring.probe import computing_dtypes, probe_batch, probe_sample, quiet
from rlbatch.scoring.transforms import LogitTransform, logit_transform, switched_off
from rlbatch.scoring.wrappers import call_hooks, model_name
from rlbatch_kernels import token_logprobs

_ROW = 8
"""Tokens of the row: few, because its plain logits are made whole."""
_SPAN = 64.0
"""Made-up logits reach from -64 to 64: every known cap (15 to 50) bends that by far more than rounding."""
_ROUNDINGS = 4
"""A transform takes up to four operations, each rounded to the model's dtype."""
_MATMUL_PRECISION = 2.0**-12
"""Relative error allowed between two ways to compute the head in float32, TF32 included."""

_Proven: TypeAlias = "weakref.WeakKeyDictionary[nn.Module, set[tuple[object, ...]]]"

_PROVEN: "weakref.WeakKeyDictionary[nn.Module, _Proven]" = weakref.WeakKeyDictionary()
"""Model as it is called -> the heads it was proven with, since PEFT turns from one to another and back ->
what was hooked onto the call then."""


def require_known_head(model: nn.Module) -> None:
    """Pass a model whose logits are known to be what `logprob_head` takes them for; proven once.

    Once for each set of hooks on the model and its head, and of forwards patched onto them, which must be the
    same on all ranks of a sharded model.

    Raises:
        ScoringError: the head cannot be overridden, or the model does something else to its logits.
    """
    head = output_head(model)
    proven = _PROVEN.setdefault(model, weakref.WeakKeyDictionary()).setdefault(head, set())
    hooks = call_hooks(model, head)
    if hooks in proven:
        return
    transform = logit_transform(model)
    batch = probe_batch(
        [probe_sample(_ROW, seed=0, vocab_size=model_vocab_size(model))], layout="padded", model=model
    )
    with quiet(model):
        # First, and with its errors as they are: a model that cannot run at all is no matter of its head.
        with computing_dtypes(model) as dtypes, same_dtype_required(model, head):
            logits = model(**model_inputs(batch)).logits
        precision = max(_MATMUL_PRECISION, *(torch.finfo(dtype).eps for dtype in dtypes))
        _check_transform(model, head, batch, transform)
        _check_untouched(model, head, batch)
        _check_logprobs(model, head, batch, transform, logits, precision)
    proven.add(hooks)


def _check_transform(model: nn.Module, head: nn.Linear, batch: Batch, transform: LogitTransform) -> None:
    """Made-up head output [B, T, V] must come out as the transform says."""
    made: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        num_rows = hidden.shape[:-1].numel()
        values = torch.linspace(-_SPAN, _SPAN, num_rows * head.out_features, device=hidden.device)
        made.append(values.to(hidden.dtype).reshape(*hidden.shape[:-1], head.out_features))
        return made[-1]

    logits = _answer(model, head, batch, forward)
    if not made:
        raise _unknown(model, "a forward that calls the head", "the head was not called")
    expected = transform(made[-1])
    rounding = _ROUNDINGS * torch.finfo(made[-1].dtype).eps * float(expected.abs().max())
    _compare(model, "logits", logits, expected, rounding)


def _check_untouched(model: nn.Module, head: nn.Linear, batch: Batch) -> None:
    """With the transform switched off, made-up logprobs [B, T] must come out as they are, in float32."""
    made = torch.linspace(-_SPAN, 0, batch.target_ids.numel(), device=batch.target_ids.device)
    made = made.reshape(batch.target_ids.shape)
    with switched_off(model):
        answer = _answer(model, head, batch, lambda hidden: made.to(hidden.device))
    if answer.dtype != made.dtype:
        raise _unknown(model, "logprobs in float32, as the head gives them", f"cast to {answer.dtype}")
    rounding = _SPAN * torch.finfo(made.dtype).eps
    _compare(model, "what the head gives under logprob_head", answer, made, rounding)


def _check_logprobs(
    model: nn.Module,
    head: nn.Linear,
    batch: Batch,
    transform: LogitTransform,
    logits: Tensor,
    precision: float,
) -> None:
    """Logprobs of the overridden head must be those of the model's plain logits [B, T, V]."""
    if logits.shape[:-1] != batch.target_ids.shape:
        raise _unknown(model, f"logits of {_ROW} tokens", f"shape {list(logits.shape)}")
    expected = token_logprobs(logits, batch.target_ids, temperature=batch.temperature, mask=batch.loss_mask)
    with switched_off(model):
        answer = _answer(model, head, batch, logprob_forward(head, batch, transform))
    rounding = _ROUNDINGS * precision * max(1.0, float(logits.abs().max()))
    _compare(model, "logprobs", answer, expected, rounding)


def _answer(model: nn.Module, head: nn.Linear, batch: Batch, forward: Callable[[Tensor], Tensor]) -> Tensor:
    """`.logits` of the model while its head computes `forward`; what fails there is the model's refusal."""
    try:
        with overridden(head, forward):
            answer = model(**model_inputs(batch)).logits
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ScoringError):
            raise
        raise _unknown(
            model, "a forward that takes any output of the head", f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(answer, Tensor):
        raise _unknown(model, "logits", type(answer).__name__)
    return answer


def _compare(model: nn.Module, what: str, found: Tensor, expected: Tensor, rounding: float) -> None:
    if found.shape != expected.shape:
        raise _unknown(model, f"{what} of shape {list(expected.shape)}", f"shape {list(found.shape)}")
    apart = float((found.double() - expected.double()).abs().max())
    # Written so that NaN is refused too.
    if not apart <= rounding:
        raise _unknown(
            model, f"{what} within {rounding:.1e} of what the head's output gives", f"{apart:.3g} apart"
        )


def _unknown(model: nn.Module, expected: str, found: str) -> ScoringError:
    return ScoringError.of(
        finding("head-unknown", expected=f"from {model_name(model)}: {expected}", found=found)
    )
