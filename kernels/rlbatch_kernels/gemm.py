"""Matrix products of tiles, by the vendor's library that is fastest and most even-handed.

On the CPU float32 goes through oneDNN where that passes a self-test: as fast as MKL on Intel and twice as
fast on AMD, and unlike MKL it gives a row the same bits on any number of threads.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SELF_TEST_ERROR = 1e-5
"""Of sums of 64 products, near 8: float32 gives 1e-6, a path that rounds to bfloat16 gives 1e-2."""


_switch = threading.Lock()
_num_exact = {"cpu": 0, "cuda": 0}
"""Threads within `exact_products`, by device."""
_allowed_before: dict[str, str] = {}


@contextmanager
def exact_products(*factors: Tensor) -> Iterator[None]:
    """Within, products of float32 are float32 whatever torch is allowed, which it is again afterwards.

    `torch.set_float32_matmul_precision` lets oneDNN round factors to bfloat16, which costs 0.03 nats, and
    CUDA to TF32. On CUDA that is left on where a factor is of half precision: TF32 holds each of its values.

    The switch is one of the process. Where several threads are within, the first turns it and the last turns
    it back; another thread's own products may meanwhile be more exact than it asked for.
    """
    kind = factors[0].device.type
    switch: Any = getattr(torch.backends.cuda if kind == "cuda" else torch.backends.mkldnn, "matmul", None)
    is_rounded_anyway = kind == "cuda" and any(factor.dtype != torch.float32 for factor in factors)
    # Before torch 2.9 a device had no switch of its own.
    if kind not in _num_exact or is_rounded_anyway or not hasattr(switch, "fp32_precision"):
        yield
        return
    with _switch:
        if _num_exact[kind] == 0 and switch.fp32_precision not in _EXACT:
            _allowed_before[kind] = switch.fp32_precision
            switch.fp32_precision = "ieee"
        _num_exact[kind] += 1
    try:
        yield
    finally:
        with _switch:
            _num_exact[kind] -= 1
            if _num_exact[kind] == 0 and kind in _allowed_before:
                switch.fp32_precision = _allowed_before.pop(kind)


_EXACT = ("none", "ieee")
"""What the switch says where float32 is not rounded: nothing, as by default, or so."""


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right.T: [n, k] and [m, k] of one dtype give [n, m] in it."""
    if left.dtype == torch.float32 and left.device.type == "cpu" and left.shape[0] > 1 and _onednn_works():
        return _onednn(left, right)
    return left @ right.t()


def rows_agree(shape: tuple[int, int, int], step: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a row of a product has the same bits in tiles of every multiple of `step` up to a tallest one.

    `shape` is (rows, terms, columns) of the tallest. Tried once for each shape, dtype, device and number of
    threads, since libraries choose their code by these.
    """
    return _rows_agree(shape, step, dtype, device, torch.get_num_threads())


@functools.cache
def _rows_agree(
    shape: tuple[int, int, int], step: int, dtype: torch.dtype, device: torch.device, _: int
) -> bool:
    num_rows, num_terms, num_columns = shape
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(count, num_terms, generator=generator).to(device, dtype)
        for count in (num_rows, num_columns)
    )
    tallest = product(left, right)
    return all(
        torch.equal(product(left[-height:], right), tallest[-height:])
        for height in range(step, num_rows, step)
    )


def _onednn(left: Tensor, right: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return found


@functools.cache
def _onednn_works() -> bool:
    """The op is not public: it may be absent, take other arguments, or compute in another precision."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(count, 64, generator=generator) for count in (33, 17))
    try:
        found = _onednn(left, right)
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected = left.double() @ right.double().t()
    return found.shape == expected.shape and bool((found - expected).abs().max() <= SELF_TEST_ERROR)
