"""The guards that the interpreter is run under do fire, and its faults are still those they make up for."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET is not set", allow_module_level=True)

import interpreter
import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, interpreter_builder


@triton.jit
def copy_four(source, target, at):
    lane = tl.arange(0, 4)
    tl.store(target + at + lane, tl.load(source + lane))


@triton.jit
def take_number(counter, target):
    number = tl.load(counter)
    tl.store(target + tl.program_id(0), number)
    tl.store(counter, number + 1)


@pytest.fixture(autouse=True)
def _start() -> None:
    interpreter.start_test()


@pytest.mark.parametrize("at", [-1, 1])
def test_triton_writes_beside_a_buffer_are_errors(at: int) -> None:
    target = torch.zeros(6)[1:5]
    with pytest.raises(RuntimeError, match="copy_four wrote beside a buffer of 16 bytes"):
        copy_four[(1,)](torch.ones(4), target, at)


def test_triton_reads_beside_a_buffer_are_nan() -> None:
    target = torch.zeros(4)
    copy_four[(1,)](torch.ones(6)[1:4], target, 0)
    assert target[:3].tolist() == [1, 1, 1]
    assert target[3].isnan()


def test_triton_programs_run_in_another_order_than_their_numbers() -> None:
    counter, target = torch.zeros(1), torch.zeros(8)
    take_number[(8,)](counter, target)
    assert sorted(target.tolist()) == list(range(8))
    assert target.tolist() != list(range(8))


def test_triton_interpreter_still_cuts_bits_off_bfloat16() -> None:
    # 1 + 3/256 lies halfway between two of bfloat16; to even is up. Where this fails, drop `cast_to_nearest`.
    exact = TensorHandle(np.array([1.01171875], dtype=np.float32), tl.float32)
    cut = interpreter.INNER_CAST(interpreter_builder, exact, tl.bfloat16)
    rounded = interpreter.cast_to_nearest(interpreter_builder, exact, tl.bfloat16)
    assert [int(handle.data[0]) for handle in (cut, rounded)] == [0x3F81, 0x3F82]


def test_triton_interpreter_still_multiplies_the_bits_of_bfloat16() -> None:
    # 1.0 is 0x3f80 in bfloat16. Where this fails, drop `dot_of_values`.
    one = TensorHandle(np.array([[0x3F80]], dtype=np.uint16), tl.bfloat16)
    zero = TensorHandle(np.zeros((1, 1), dtype=np.float32), tl.float32)
    found = [
        float(dot(interpreter_builder, one, one, zero, None, 0).data[0, 0])
        for dot in (interpreter.INNER_DOT, interpreter.dot_of_values)
    ]
    assert found == [0x3F80**2, 1.0]
