"""Every Triton kernel compiled for sm_80 and sm_90, without a GPU, and a look at its machine code."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlbatch_kernels import (
    STAT_COLUMNS,
    stats,
    triton_library,
    triton_linear,
    triton_softmax,
    triton_stats,
)
from rlbatch_kernels.per_token import KINDS

if (reason := triton_library.missing()) is not None:
    pytest.skip(reason, allow_module_level=True)
if "TRITON_INTERPRET" in os.environ:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MAX_STACK = 64
MAX_SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes a program may have, by NVIDIA's tables of compute capabilities."""

STATE = {"offsets": "*i64", "target_ids": "*i64", "scales": "*fp64", "maxima": "*fp64"}
NUMBERS = {"logit_scale": "fp32", "soft_cap": "fp32", "num_columns": "i32", "first_column": "i32"}
PLAIN: dict[str, Any] = {"CAPPED": False, "MASKED": False, "vocab_mask": None}
LIMITS = (
    "max_exponent",
    "k3_cap",
    "zero_needs_below",
    "confident_from",
    "disagrees_by",
    "residual_clip",
    "window_least",
)


SHAPED: dict[str, Any] = {"CAPPED": True, "MASKED": True}


def forward_case(dtype: str, *, full: bool, shaped: bool = False) -> tuple[dict[str, str], dict[str, Any]]:
    more = {"weighted_sums": "*fp64", "num_above": "*i64"}
    types = {"logits": f"*{dtype}", **STATE, "totals": "*fp64", "targets": "*fp64", **NUMBERS}
    constants = {"FULL": full, "BLOCK": triton_softmax.BLOCK, "ALIGNMENT": triton_softmax.ALIGNMENT}
    constants |= SHAPED if shaped else PLAIN
    types |= {"vocab_mask": "*u8"} if shaped else {}
    return (types | more, constants) if full else (types, constants | dict.fromkeys(more))


def backward_case(
    dtype: str, out: str, *, slope: bool, same: bool, shaped: bool = False
) -> tuple[dict[str, str], dict[str, Any]]:
    types = {"logits": f"*{dtype}", **STATE, "at_targets": "*fp64", "constants": "*fp64", "out": f"*{out}"}
    constants = {
        "SLOPE": slope,
        "SAME_OFFSETS": same,
        "BLOCK": triton_softmax.BLOCK,
        "ALIGNMENT": triton_softmax.ALIGNMENT,
    }
    constants |= SHAPED if shaped else PLAIN
    types |= {"vocab_mask": "*u8"} if shaped else {}
    for name, wanted, kind in (("slopes", slope, "*fp64"), ("out_offsets", not same, "*i64")):
        if wanted:
            types[name] = kind
        else:
            constants[name] = None
    return types | NUMBERS, constants


def head_case(dtype: str, *, shaped: bool) -> tuple[dict[str, str], dict[str, Any]]:
    types = {"hidden": f"*{dtype}", "weight": f"*{dtype}", "weight_stride": "i32", "width": "i32"}
    types |= {"offsets": "*i64", "target_ids": "*i64", "scales": "*fp64"} | NUMBERS
    types |= {"maxima": "*fp32", "totals": "*fp32", "targets": "*fp64", "num_tokens": "i32"}
    constants = {
        name: getattr(triton_linear, name) for name in ("ROWS", "COLUMNS", "STEP", "TILES", "ALIGNMENT")
    }
    constants |= {"WHOLE_STEPS": True, "BIASED": shaped} | (SHAPED if shaped else {**PLAIN, "bias": None})
    return types | ({"bias": f"*{dtype}", "vocab_mask": "*u8"} if shaped else {}), constants


def compiled(
    kernel: Any,
    case: tuple[dict[str, str], dict[str, Any]],
    capability: int,
    num_warps: int,
    num_stages: int = 3,
) -> tuple[str, dict[str, int]]:
    """PTX, and what the machine code uses: REG, STACK, LOCAL. Pointers and widths are multiples of 16."""
    types, constants = case
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ("weight_stride", "width")
    }
    found = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    assert found.metadata.shared <= MAX_SHARED[capability]
    cubin = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    cubin.write_bytes(found.asm["cubin"])
    usage = subprocess.run(
        [CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    return found.asm["ptx"], {
        name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)
    }


def assert_nothing_spills(usage: dict[str, int], num_warps: int, programs: int = 2) -> None:
    assert usage["LOCAL"] == 0
    assert usage["STACK"] <= MAX_STACK
    # Of 65,536 registers a multiprocessor: so many programs at a time.
    assert programs * usage["REG"] * 32 * num_warps <= 65536


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture(params=[80, 90])
def capability(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# A block of 4096 is 16 a thread: four loads of 16 bytes in float32, two in half precision.
@pytest.mark.parametrize(
    ("dtype", "full", "loads"), [("fp32", True, 4), ("fp32", False, 4), ("bf16", True, 2), ("fp16", False, 2)]
)
def test_triton_forward_reads_in_vectors_at_64_bit_addresses(
    capability: int, dtype: str, full: bool, loads: int
) -> None:
    warps = triton_softmax.NUM_WARPS
    ptx, usage = compiled(triton_library.softmax().forward, forward_case(dtype, full=full), capability, warps)
    assert_nothing_spills(usage, warps)
    assert len(re.findall(r"ld\.global\S*\.v4", ptx)) == loads
    # The row's place is loaded as 64 bits, and no address is made in 32.
    assert re.search(r"ld\.global\S*\.b64", ptx)
    assert not re.search(r"(ld|st)\.global\S* .*\[%r\d", ptx)


@pytest.mark.parametrize(
    ("dtype", "out", "slope", "same", "loads", "stores"),
    [
        ("fp32", "fp32", True, True, 4, 4),
        ("bf16", "bf16", True, True, 2, 2),
        # A tile of the head: float32 logits to bfloat16 gradients in a tensor of the same strides.
        ("fp32", "bf16", False, True, 4, 2),
        # Elsewhere: written lane by lane.
        ("bf16", "bf16", False, False, 2, 0),
    ],
)
def test_triton_backward_reads_and_writes_in_vectors(
    capability: int, dtype: str, out: str, slope: bool, same: bool, loads: int, stores: int
) -> None:
    warps = triton_softmax.NUM_WARPS
    case = backward_case(dtype, out, slope=slope, same=same)
    ptx, usage = compiled(triton_library.softmax().backward, case, capability, warps)
    assert_nothing_spills(usage, warps)
    assert len(re.findall(r"ld\.global\S*\.v4", ptx)) == loads
    assert len(re.findall(r"st\.global\S*\.v4", ptx)) == stores
    assert not re.search(r"(ld|st)\.global\S* .*\[%r\d", ptx)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_triton_caps_and_masks_in_registers(capability: int, dtype: str) -> None:
    warps, loads = triton_softmax.NUM_WARPS, 4 if dtype == "fp32" else 2
    kernels = triton_library.softmax()
    for kernel, case in (
        (kernels.forward, forward_case(dtype, full=True, shaped=True)),
        (kernels.backward, backward_case(dtype, dtype, slope=True, same=True, shaped=True)),
    ):
        ptx, usage = compiled(kernel, case, capability, warps)
        assert_nothing_spills(usage, warps)
        # Of the logits, and at least one of the mask.
        assert len(re.findall(r"ld\.global\S*\.v4", ptx)) > loads


@pytest.mark.parametrize(("dtype", "shaped"), [("bf16", False), ("bf16", True), ("fp16", False)])
def test_triton_fused_head_multiplies_on_tensor_cores(capability: int, dtype: str, shaped: bool) -> None:
    warps, stages = triton_linear.NUM_WARPS, triton_linear.NUM_STAGES
    case = head_case(dtype, shaped=shaped)
    ptx, usage = compiled(triton_library.linear().pieces, case, capability, warps, stages)
    # A tile's sums fill the registers of one program.
    assert_nothing_spills(usage, warps, programs=1)
    assert usage["STACK"] == 0
    product = {80: r"mma\.sync\.aligned\.m16n8k16", 90: r"wgmma\.mma_async"}[capability]
    assert re.search(product, ptx)
    # Both factors come in copies of 16 bytes, while the product before is computed.
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x\w+)", ptx)
    assert set(sizes) == {"0x10"}
    assert "atom." not in ptx
    assert not re.search(r"(ld|st)\.global\S* .*\[%r\d", ptx)


def test_triton_fused_head_combines_pieces_without_atomics(capability: int) -> None:
    types = dict.fromkeys(("piece_maxima", "piece_totals"), "*fp32") | {
        "num_tokens": "i32",
        "num_pieces": "i32",
    }
    types |= dict.fromkeys(("scales", "maxima", "totals"), "*fp64")
    case = (types, {"ROWS": triton_linear.COMBINED_ROWS})
    ptx, usage = compiled(triton_library.linear().combine, case, capability, 4)
    assert_nothing_spills(usage, 4)
    assert "atom." not in ptx


# Segments begin anywhere, so their loads are lane by lane.
@pytest.mark.parametrize("kind", ["", *KINDS])
def test_triton_statistics_hold_every_sum_in_registers(capability: int, kind: str) -> None:
    types = {"trainer": "*fp32", "inference": "*fp32", "mask": "*u8", "bounds": "*i64", "partials": "*fp64"}
    types |= dict.fromkeys((*LIMITS, "low", "high"), "fp32")
    constants: dict[str, Any] = {
        "KIND": kind,
        "BLOCK": triton_stats.BLOCK,
        "WINDOW": stats.WINDOW,
        "WIDTH": triton_stats.PARTIAL_WIDTH,
    }
    for name, read_by in (("out", KINDS), ("advantages", KINDS[1:])):
        if kind in read_by:
            types[name] = "*fp32"
        else:
            constants[name] = None
    warps = triton_stats.NUM_WARPS
    ptx, usage = compiled(triton_library.stats().pieces, (types, constants), capability, warps)
    assert_nothing_spills(usage, warps)
    assert "atom." not in ptx
    assert "red.global" not in ptx


def test_triton_combine_compiles_without_atomics(capability: int) -> None:
    types = {"partials": "*fp64", "ends": "*i64", "table": "*fp64"}
    constants = {"NUM_COLUMNS": len(STAT_COLUMNS), "WIDTH": triton_stats.PARTIAL_WIDTH}
    ptx, usage = compiled(triton_library.stats().combine, (types, constants), capability, 1)
    assert_nothing_spills(usage, 1)
    assert "atom." not in ptx
    assert "red.global" not in ptx
