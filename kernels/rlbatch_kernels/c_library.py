"""The shared library of `csrc/`, as ctypes sees it: found, checked, and the reason where there is none.

It is built when the package is installed. Knows nothing of what its functions compute.
"""

import ctypes
import functools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

INTERFACE = 4
"""What `csrc/kernels.c` must say it is; a library built from other sources is not used."""

ELEMENTS_A_THREAD = 2**16
"""Less work than this is not worth waking another thread for: about 20 microseconds of it."""

LOGIT_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the dtypes in `csrc/kernels.c`."""

_Pointer = ctypes.c_void_p
_Int64 = ctypes.c_int64


class Shaping(ctypes.Structure):
    """`struct shaping`."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("logit_scale", "soft_cap", "scale_over_cap", "one_over_cap")),
        ("vocab_mask", _Pointer),
    )


class Rows(ctypes.Structure):
    """`struct rows`."""

    _fields_ = (
        ("logits", _Pointer),
        ("dtype", _Int64),
        ("offsets", _Pointer),
        ("num_rows", _Int64),
        ("num_columns", _Int64),
        ("first_column", _Int64),
        ("target_ids", _Pointer),
        ("temperature", _Pointer),
        ("shaping", ctypes.POINTER(Shaping)),
    )


class State(ctypes.Structure):
    """`struct state`."""

    _fields_ = tuple((name, _Pointer) for name in ("maximum", "total", "target", "weighted", "above"))


class Upstream(ctypes.Structure):
    """`struct upstream`."""

    _fields_ = (
        ("at_target", _Pointer),
        ("constant", _Pointer),
        ("slope", _Pointer),
        ("out", _Pointer),
        ("out_offsets", _Pointer),
        ("out_dtype", _Int64),
    )


class Limits(ctypes.Structure):
    """`struct limits`."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in (
            "max_exponent",
            "k3_cap",
            "zero_needs_below",
            "confident_from",
            "disagrees_by",
            "residual_clip",
            "window_least",
        )
    )


class Written(ctypes.Structure):
    """`struct written`."""

    _fields_ = (
        ("out", _Pointer),
        ("advantages", _Pointer),
        ("kind", _Int64),
        ("low", ctypes.c_float),
        ("high", ctypes.c_float),
    )


class LibraryMissingError(RuntimeError):
    """There is no usable library; the text says why and what to do."""


@functools.cache
def functions() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        LibraryMissingError: it was not built, cannot be loaded, or was built from other sources.
    """
    path = _path()
    try:
        loaded = ctypes.CDLL(str(path))
        interface = loaded.rlb_interface()
    except (OSError, AttributeError) as error:
        raise LibraryMissingError(f"{path.name} cannot be loaded: {error}; install again") from error
    if interface != INTERFACE:
        raise LibraryMissingError(
            f"{path.name} was built from other sources (interface {interface}, expected {INTERFACE}); "
            "install again"
        )
    _declare(loaded)
    return loaded


def missing() -> str | None:
    """Why there is no library to use; None where there is one."""
    try:
        functions()
    except LibraryMissingError as error:
        return str(error)
    return None


@functools.cache
def level() -> int:
    """Which of the compiled processor levels to run: the best that this processor has."""
    return int(functions().rlb_num_levels()) - 1


def num_threads(num_elements: int) -> int:
    """Threads for a pass over `num_elements`, never more than torch uses."""
    return max(1, min(torch.get_num_threads(), num_elements // ELEMENTS_A_THREAD))


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a tensor's first element; None for None."""
    return None if tensor is None else tensor.data_ptr()


def _path() -> Path:
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("csrc") / f"kernels{suffix}"
        if path.exists():
            return path
    raise LibraryMissingError(
        "the C library was not built at installation (no C compiler then?); "
        "install gcc or clang, then install again with pip's --force-reinstall --no-cache-dir, "
        "which otherwise takes the wheel it has kept"
    )


def _declare(loaded: ctypes.CDLL) -> None:
    number = ctypes.c_int
    loaded.rlb_level_name.restype = ctypes.c_char_p
    loaded.rlb_level_name.argtypes = (number,)
    loaded.rlb_alignment_stats.restype = number
    loaded.rlb_alignment_stats.argtypes = (
        *[_Pointer] * 3,
        ctypes.POINTER(Written),
        _Int64,
        _Pointer,
        _Int64,
        ctypes.POINTER(Limits),
        _Pointer,
        number,
        number,
    )
    loaded.rlb_count_outside.restype = _Int64
    loaded.rlb_count_outside.argtypes = (_Pointer, _Int64, _Int64, _Pointer, _Int64)
    loaded.rlb_softmax_forward.restype = None
    loaded.rlb_softmax_forward.argtypes = (ctypes.POINTER(Rows), ctypes.POINTER(State), number, number)
    loaded.rlb_softmax_backward.restype = None
    loaded.rlb_softmax_backward.argtypes = (
        ctypes.POINTER(Rows),
        ctypes.POINTER(State),
        ctypes.POINTER(Upstream),
        number,
        number,
    )
