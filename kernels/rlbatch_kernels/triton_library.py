"""Whether Triton is here, and its kernels, imported at the first call: nothing else imports Triton."""

import contextlib
import functools
import importlib.util
from types import ModuleType

import torch
from torch import Tensor


@functools.cache
def missing() -> str | None:
    """Why Triton's kernels cannot be used; None where they can. Does not import it."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (torch for CUDA brings the version that it needs)"
    return None


@functools.cache
def softmax() -> ModuleType:
    """`triton_jit.softmax`."""
    from rlbatch_kernels.triton_jit import softmax as found

    return found


@functools.cache
def stats() -> ModuleType:
    """`triton_jit.stats`."""
    from rlbatch_kernels.triton_jit import stats as found

    return found


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launch where the tensor is: Triton itself takes the current device."""
    if tensor.device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
