"""The output head of a model: which ones can be overridden, and the override itself.

`forward` of the existing module is overridden on the instance, never the module replaced: FSDP's hooks hang
on the module, and gather its weight just before its forward runs. Knows nothing of whether the model's logits
are what the head gives; `rlbatch.scoring.proof` does.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.errors import ScoringError
from rlbatch.scoring.kept import kept_sets
from rlbatch.scoring.model import embedding_of
from rlbatch.scoring.transforms import LogitTransform
from rlbatch.scoring.wrappers import model_name, unwrapped
from rlbatch_kernels import linear_logprobs

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def output_head(model: nn.Module) -> nn.Linear:
    """The output embedding of the model within its wrappers, where it is a plain linear layer.

    Raises:
        ScoringError: there is none; or it is quantised, adapted or otherwise computes something of its own;
            or its forward is overridden already, by an offload hook or by this package.
    """
    name = model_name(model)
    found = embedding_of(model, "get_output_embeddings")
    if found is None:
        raise _unusable(f"a transformers model with output embeddings, in {name}", "none")
    head = unwrapped(found)
    # Quantised layers subclass Linear, adapted ones are named like it; each has a forward of its own.
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise _unusable(
            f"a plain torch.nn.Linear as the head of {name}", f"{type(head).__module__}.{type(head).__name__}"
        )
    if head.weight.dtype not in _WEIGHT_DTYPES:
        raise _unusable(f"a float weight of at least 16 bits in the head of {name}", str(head.weight.dtype))
    if head in _IN_USE:
        raise _unusable(
            f"the head of {name} free",
            "one that gives logprobs already, in another thread or an outer logprob_head",
            likely="two threads score one model at once, or logprob_head was entered twice",
            fix="score one model from one thread at a time, and leave logprob_head before the next batch",
        )
    if "forward" in vars(head):
        raise _unusable(f"the head of {name} with its own forward", "one that is overridden on the instance")
    return head


_IN_USE: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Heads that are overridden now."""


@contextmanager
def overridden(head: nn.Linear, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within, the head computes `forward`; module, hooks and parameters stay as they are."""
    head.forward = forward  # type: ignore[assignment]
    _IN_USE.add(head)
    try:
        yield
    finally:
        _IN_USE.discard(head)
        del head.forward


@contextmanager
def same_dtype_required(model: nn.Module, head: nn.Linear) -> Iterator[None]:
    """Within, a head of another dtype than its hidden states is refused by name, and told how to fit.

    Raises:
        ScoringError: when the model is called.
    """

    def check(head: nn.Linear, args: tuple[Tensor, ...]) -> None:
        hidden = args[0]
        if hidden.dtype != head.weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
            raise _unusable(
                f"hidden states of {head.weight.dtype}, as its weight, at the head of {model_name(model)}",
                str(hidden.dtype),
                likely="the head was cast, and what it is given was not",
                fix="head.register_forward_pre_hook(lambda head, args: (args[0].to(head.weight.dtype),))",
            )

    handle = head.register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def logprob_forward(head: nn.Linear, batch: Batch, transform: LogitTransform) -> Callable[[Tensor], Tensor]:
    """A forward for `head`: hidden states [B, T, D] -> logprobs [B, T] float32 of the batch's targets."""
    kept = kept_sets(batch)

    def forward(hidden: Tensor) -> Tensor:
        require_whole(head.weight)
        if hidden.shape[:-1] != batch.target_ids.shape:
            raise ScoringError.of(
                finding(
                    "head-inputs",
                    expected=f"hidden states of the batch's {list(batch.target_ids.shape)} positions",
                    found=f"shape {list(hidden.shape)}",
                )
            )
        logprobs = linear_logprobs(
            hidden,
            head.weight,
            batch.target_ids,
            temperature=batch.temperature,
            mask=batch.loss_mask,
            bias=head.bias,
            logit_scale=transform.logit_scale,
            soft_cap=transform.soft_cap,
            kept=kept,
        )
        # The op answers a float64 model in float64.
        return logprobs.float()

    # torch.compile would trace all that the op checks, and again for each batch.
    uncompiled: Callable[[Tensor], Tensor] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return uncompiled


def require_whole(weight: Tensor) -> None:
    """Refuse a weight that is not all here: with a part of the vocabulary the normaliser would be wrong.

    Checked where the weight is used, since FSDP and ZeRO gather it only around the head's forward.

    Raises:
        ScoringError: the weight is sharded, empty, or on the meta device.
    """
    if isinstance(weight, DTensor):
        found = f"a DTensor with placements {weight.placements}"
    elif weight.is_meta:
        found = "a weight on the meta device"
    elif weight.numel() == 0:
        found = f"an empty weight of shape {list(weight.shape)}"
    else:
        return
    raise ScoringError.of(finding("head-sharded", expected="the head's whole weight [V, D]", found=found))


def _unusable(
    expected: str, found: str, *, likely: str | None = None, fix: str | None = None
) -> ScoringError:
    return ScoringError.of(finding("head-unusable", expected=expected, found=found, likely=likely, fix=fix))
