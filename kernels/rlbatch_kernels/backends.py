"""Which backend serves a call: the table of them, the choice, and what was chosen last.

A backend is a subclass of `Softmax` and a `segment_stats`. `auto` takes the first of `BACKENDS` that serves
the device and dtypes of a call; torch serves all. Where one that would serve is missing, such as a C library
that was not built, torch takes over and a warning says so once. A backend asked for by name serves, or the
call is an error.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbatch_kernels import c_library, c_stats, stats, triton_library, triton_stats
from rlbatch_kernels.c_softmax import CSoftmax
from rlbatch_kernels.errors import BackendError, BackendWarning
from rlbatch_kernels.softmax import Softmax
from rlbatch_kernels.triton_softmax import TritonSoftmax

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One implementation of the ops."""

    name: str
    device_type: str | None
    """`cpu` or `cuda`; None = every device."""
    logit_dtypes: tuple[torch.dtype, ...] | None
    """Of logits, hidden states and weights; None = every float dtype."""
    logprob_dtypes: tuple[torch.dtype, ...] | None
    """Of logprobs; None = every float dtype."""
    missing: Callable[[], str | None]
    """Why it cannot be used here at all; None where it can."""
    softmax: type[Softmax]
    segment_stats: Callable[..., Tensor]

    def unfit(self, op: str, tensors: tuple[Tensor, ...]) -> str | None:
        """Why it is not made for these arguments; None where it is."""
        dtypes = self.logprob_dtypes if op == "alignment_stats" else self.logit_dtypes
        for tensor in tensors:
            if self.device_type not in (None, tensor.device.type):
                return f"it runs on {self.device_type}, and the arguments are on {tensor.device.type}"
            if dtypes is not None and tensor.dtype not in dtypes:
                names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                return f"it takes {names}, and an argument is {str(tensor.dtype).removeprefix('torch.')}"
        return None


def _never() -> None:
    return None


BACKENDS = (
    Backend(
        name="c",
        device_type="cpu",
        logit_dtypes=(torch.float32, torch.bfloat16, torch.float16),
        logprob_dtypes=(torch.float32,),
        missing=c_library.missing,
        softmax=CSoftmax,
        segment_stats=c_stats.segment_stats,
    ),
    Backend(
        name="triton",
        device_type="cuda",
        logit_dtypes=(torch.float32, torch.bfloat16, torch.float16),
        logprob_dtypes=(torch.float32,),
        missing=triton_library.missing,
        softmax=TritonSoftmax,
        segment_stats=triton_stats.segment_stats,
    ),
    Backend(
        name="torch",
        device_type=None,
        logit_dtypes=None,
        logprob_dtypes=None,
        missing=_never,
        softmax=Softmax,
        segment_stats=stats.segment_stats,
    ),
)
"""Fastest first; torch, which serves every call, is last."""

_last: dict[str, str] = {}
_warned: set[str] = set()


def last_backend(op: str) -> str | None:
    """Name of the backend that served the last call of `op` in this process; None before the first.

    Example:
        last_backend("token_logprobs") -> "c"
    """
    return _last.get(op)


def choose(op: str, requested: str, *tensors: Tensor) -> Backend:
    """The backend for a call of `op` with these arguments.

    Raises:
        BackendError: `requested` is no backend, or one that cannot serve the call.
    """
    chosen = _first_fit(op, tensors) if requested == AUTO else _named(op, requested, tensors)
    _last[op] = chosen.name
    return chosen


def _named(op: str, requested: str, tensors: tuple[Tensor, ...]) -> Backend:
    for backend in BACKENDS:
        if backend.name == requested:
            reason = backend.missing() or backend.unfit(op, tensors)
            if reason is None:
                return backend
            raise BackendError(f"backend: found {requested!r}, which cannot serve this {op}: {reason}")
    names = ", ".join(repr(name) for name in (AUTO, *(backend.name for backend in BACKENDS)))
    raise BackendError(f"backend: found {requested!r}, expected one of {names}")


def _first_fit(op: str, tensors: tuple[Tensor, ...]) -> Backend:
    fit = [backend for backend in BACKENDS if backend.unfit(op, tensors) is None]
    for backend in fit:
        reason = backend.missing()
        if reason is None:
            return backend
        if backend.name not in _warned:
            # Marked first: where warnings are errors, only the first call raises.
            _warned.add(backend.name)
            text = f"rlbatch_kernels falls back from backend {backend.name!r} to {fit[-1].name!r}: {reason}"
            warnings.warn(text, BackendWarning, stacklevel=_depth_here())
    raise BackendError(f"backend: none of those known serves this {op}")


def _depth_here() -> int:
    """How many calls up from the caller the package was entered: a warning belongs to the user's line."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        frame, depth = frame.f_back, depth + 1
    return depth
