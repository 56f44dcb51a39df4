"""Whether Triton is here, and its kernels, imported at the first call: nothing else imports Triton.

`triton_jit` holds device code, as `csrc` does, and is no package: what goes through all modules of this one,
where there is no Triton, does not come upon it.
"""

import contextlib
import functools
import importlib.util
from types import ModuleType

import torch
from torch import Tensor


@functools.cache
def missing() -> str | None:
    """Why Triton's kernels cannot be used; None where they can. Tried once, where there is a CUDA device."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (torch for CUDA brings the version that it needs)"
    if not torch.cuda.is_available():
        return None
    try:
        try_launch()
    # Whatever it is (no C compiler, a driver or device that is too old), torch can serve.
    except Exception as error:
        return f"a kernel of one store does not run: {type(error).__name__}: {error}"
    return None


def try_launch() -> None:
    """Compile and launch a kernel of one store. Does not wait for it: a CUDA graph may be being recorded."""
    from rlbatch_kernels.triton_jit import trial

    trial.store_one[(1,)](torch.empty(1, dtype=torch.int32, device="cuda"))


@functools.cache
def softmax() -> ModuleType:
    """`triton_jit.softmax`."""
    from rlbatch_kernels.triton_jit import softmax as found

    return found


@functools.cache
def linear() -> ModuleType:
    """`triton_jit.linear`."""
    from rlbatch_kernels.triton_jit import linear as found

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
