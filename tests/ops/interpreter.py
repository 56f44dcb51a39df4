"""What Triton's interpreter does not do by itself: exact bfloat16, guarded buffers, programs in any order.

With TRITON_INTERPRET=1 in the environment kernels run on the CPU, in numpy, one program after the other. Then
`install` makes the triton backend take CPU tensors, and every launch

- runs on copies of its arguments, each between guards of bytes 0xff, which are NaN in every float format: an
  element read beside a buffer poisons the result, one written there is an error;
- runs its programs in a shuffled order, so that one which needs another's result is found out.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import settings
from torch import Tensor
from triton.runtime import interpreter

from rlbatch_kernels import backends

GUARD = 2**16
"""Bytes before and after each argument: more than a block of float32."""

MAX_PROGRAMS = 80
"""A test that needs more is skipped: a program takes the interpreter 5 to 20 ms."""

MAX_EXAMPLES = 3
"""Of a property, for the same reason."""

INNER_CAST = interpreter.InterpreterBuilder.cast_impl
INNER_DOT = interpreter.InterpreterBuilder.create_dot


def install() -> None:
    """Patch the interpreter and the table of backends; for the life of the process."""
    settings.register_profile("interpreted", settings(), max_examples=MAX_EXAMPLES)
    settings.load_profile("interpreted")
    on_cpu = (
        dataclasses.replace(known, device_type="cpu") if known.name == "triton" else known
        for known in backends.BACKENDS
    )
    backends.BACKENDS = tuple(on_cpu)
    interpreter.InterpreterBuilder.cast_impl = cast_to_nearest
    interpreter.InterpreterBuilder.create_dot = dot_of_values
    interpreter.GridExecutor.__call__ = guarded(interpreter.GridExecutor.__call__)
    interpreter.interpreter_builder.set_grid_idx = shuffled(interpreter.interpreter_builder.set_grid_idx)


def cast_to_nearest(builder: Any, src: Any, dst_type: Any) -> Any:
    """float32 to bfloat16 as every device does it; the interpreter's own cast cuts bits off."""
    if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
        return INNER_CAST(builder, src, dst_type)
    values = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
    return interpreter.TensorHandle(values.view(torch.uint16).numpy().reshape(src.data.shape), tl.bfloat16)


def dot_of_values(builder: Any, left: Any, right: Any, *others: Any) -> Any:
    """A product of bfloat16; the interpreter's own multiplies their bits as whole numbers."""
    return INNER_DOT(builder, widened(left), widened(right), *others)


def widened(handle: Any) -> Any:
    """bfloat16 as float32; anything else as it is."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def guarded(launch: Callable[..., None]) -> Callable[..., None]:
    """Run a launch on guarded copies of its tensors, and copy back what it changed."""

    def run(executor: Any, *arguments: Any, **options: Any) -> None:
        copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        given = [guard(value, copies) if isinstance(value, Tensor) else value for value in arguments]
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            # inf - inf and the like are computed on purpose.
            warnings.simplefilter("ignore", RuntimeWarning)
            launch(executor, *given, **options)
        for original, whole in copies.values():
            inside = whole[GUARD:-GUARD]
            if not (whole[:GUARD] == 0xFF).all() or not (whole[-GUARD:] == 0xFF).all():
                raise RuntimeError(f"{executor.fn.__name__} wrote beside a buffer of {len(inside)} bytes")
            if not torch.equal(inside, original):
                original.copy_(inside)

    return run


def guard(argument: Tensor, copies: dict[tuple[int, int], tuple[Tensor, Tensor]]) -> Tensor:
    """The same tensor in a guarded copy of its bytes; arguments that are one remain one."""
    if argument.numel() == 0:
        return argument
    steps = zip(argument.shape, argument.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    flat = argument.detach().as_strided((span,), (1,))
    key = (argument.data_ptr(), span)
    if key not in copies:
        original = flat.view(torch.uint8)
        whole = torch.full((2 * GUARD + original.numel(),), 0xFF, dtype=torch.uint8)
        whole[GUARD:-GUARD] = original
        copies[key] = (original, whole)
    inside = copies[key][1][GUARD:-GUARD].view(argument.dtype)
    return inside.as_strided(argument.shape, argument.stride(), inside.storage_offset())


num_programs = 0
"""Run since `start_test`."""


def start_test() -> None:
    """Give a test its MAX_PROGRAMS."""
    global num_programs
    num_programs = 0


def shuffled(set_grid_idx: Callable[..., None]) -> Callable[..., None]:
    """Let program x be another one: a permutation that the size of the grid decides."""
    orders: dict[int, list[int]] = {}

    def set_one(x: int, y: int, z: int) -> None:
        global num_programs
        num_programs += 1
        if num_programs > MAX_PROGRAMS:
            pytest.skip(f"needs more than the {MAX_PROGRAMS} programs that a test may interpret")
        size = interpreter.interpreter_builder.grid_dim[0]
        if size not in orders:
            orders[size] = torch.randperm(size, generator=torch.Generator().manual_seed(size)).tolist()
        set_grid_idx(orders[size][x], y, z)

    return set_one
