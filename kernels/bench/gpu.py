"""The Triton kernels on one GPU, in under four minutes: their tests first, then their times.

    python kernels/bench/gpu.py [--no-tests]

Every time stands beside a ceiling measured in the same run: bytes moved over time against `copy_`, a product
of the head against the vendor's GEMM of the same shape. Prints a table and, last, one line of JSON.
"""

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from rlbatch_kernels import alignment_stats, last_backend, linear_logprobs, token_statistics, triton_linear

ROOT = Path(__file__).parent.parent.parent
RUNS = 15
TEST_SECONDS = 150
FLUSHED_BYTES = 2**28
"""Written before each run, so that nothing of the one before is in the cache: five times an H200's 50 MB."""

Case = Callable[[], object]


def seconds(case: Case) -> float:
    """Median of RUNS by the device's own clock, the cache flushed before each; one run to warm up."""
    case()
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(RUNS):
        flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        case()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bytes_a_second() -> float:
    """Read and written by `copy_` of 1 GiB."""
    source = torch.ones(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def stats_figures(ceiling: float) -> dict[str, float]:
    """[2048, 8192], full mask, a segment a row: 9 bytes a token."""
    inference = -torch.rand(2048, 8192, device="cuda")
    trainer = inference + 0.01
    mask = torch.ones_like(trainer, dtype=torch.bool)
    segments = torch.tensor([(row, 0, 8192, 0) for row in range(2048)])
    time = seconds(lambda: alignment_stats(trainer, inference, mask, segments))
    require_triton("alignment_stats")
    return {"stats_ms": time * 1e3, "stats_copy_fraction": 9 * trainer.numel() / time / ceiling}


def backward_seconds(forward: Callable[[], Tensor], leaf: Tensor) -> float:
    """Of the backward alone."""
    total = forward().sum()
    return seconds(lambda: torch.autograd.grad(total, leaf, retain_graph=True))


def token_figures(ceiling: float, dtype: torch.dtype) -> dict[str, float]:
    """4096 rows of 151,936 logits: read once forward, read and written backward."""
    logits = torch.randn(4096, 151936, device="cuda", dtype=dtype).requires_grad_()
    ids = torch.arange(4096, device="cuda")
    mask = torch.ones_like(ids, dtype=torch.bool)

    def forward() -> Tensor:
        return token_statistics(logits, ids, temperature=0.7, mask=mask).logprobs

    def shaped() -> Tensor:
        # Gemma's cap, and some columns of padding.
        changes = {"soft_cap": 30.0, "vocab_mask": logits.shape[-1] - 3}
        return token_statistics(logits, ids, temperature=0.7, mask=mask, **changes).logprobs

    def plain() -> Tensor:
        with torch.no_grad():
            return (logits.float() / 0.7).log_softmax(-1).gather(-1, ids.unsqueeze(-1))

    time = seconds(forward)
    require_triton("token_statistics")
    back, shaped_back = (backward_seconds(case, logits) for case in (forward, shaped))
    name = str(dtype).removeprefix("torch.")
    return {
        f"token_{name}_ms": time * 1e3,
        f"token_{name}_copy_fraction": logits.nbytes / time / ceiling,
        f"token_{name}_backward_ms": back * 1e3,
        f"token_{name}_backward_copy_fraction": 2 * logits.nbytes / back / ceiling,
        f"token_{name}_shaped_copy_fraction": logits.nbytes / seconds(shaped) / ceiling,
        f"token_{name}_shaped_backward_copy_fraction": 2 * logits.nbytes / shaped_back / ceiling,
        f"token_{name}_vs_log_softmax": seconds(plain) / time,
    }


def linear_figures(logits_dtype: torch.dtype) -> dict[str, float]:
    """8192 tokens x 4096 x 151,936 in bfloat16, against the bare bfloat16 GEMM in pieces of 1024 tokens.

    float32 logits come from the fused kernel, which stands beside the tiles that it replaces.
    """
    hidden = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(151936, 4096, device="cuda", dtype=torch.bfloat16) / 64).requires_grad_()
    ids = torch.arange(8192, device="cuda")
    mask = torch.ones_like(ids, dtype=torch.bool)

    def forward() -> Tensor:
        return linear_logprobs(hidden, weight, ids, temperature=1.0, mask=mask, logits_dtype=logits_dtype)

    def gemm() -> None:
        with torch.no_grad():
            for piece in hidden.split(1024):
                piece @ weight.t()

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward().sum(), (hidden, weight))

    bare, time, trained = seconds(gemm), seconds(forward), seconds(both)
    require_triton("linear_logprobs")
    name = f"linear_{str(logits_dtype).removeprefix('torch.')}"
    with mock.patch.object(triton_linear, "serves", return_value=False):
        tiles = seconds(forward)
    return {
        f"{name}_ms": time * 1e3,
        f"{name}_tflops": 2 * hidden.shape[0] * weight.numel() / time / 1e12,
        f"{name}_gemm_fraction": bare / time,
        f"{name}_tiles_gemm_fraction": bare / tiles,
        f"{name}_fwd_bwd_multiple": trained / bare,
    }


def require_triton(op: str) -> None:
    """A figure of another backend must not pass for one of these kernels."""
    if last_backend(op) != "triton":
        raise SystemExit(f"{op}: served by {last_backend(op)!r}, expected 'triton'")


def run_tests() -> None:
    """Those of the ops on this device; a failure ends the script."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-k", "triton", ROOT / "tests" / "ops"]
    subprocess.run(command, check=True, timeout=TEST_SECONDS, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tests and times of the Triton kernels on a GPU.")
    parser.add_argument("--no-tests", action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device on this machine: no GPU figure")
    if not given.no_tests:
        run_tests()
    versions = f"torch {torch.__version__}, triton {importlib.metadata.version('triton')}"
    print(f"{torch.cuda.get_device_name()}, {versions}")
    ceiling = copy_bytes_a_second()
    figures = {"copy_gb_s": ceiling / 1e9, **stats_figures(ceiling)}
    for dtype in (torch.bfloat16, torch.float32):
        figures |= token_figures(ceiling, dtype)
    for dtype in (torch.bfloat16, torch.float32):
        figures |= linear_figures(dtype)
    for name, value in figures.items():
        print(f"{name:44s} {value:12.4g}")
    print(json.dumps({name: float(f"{value:.4g}") for name, value in figures.items()}))


if __name__ == "__main__":
    main()
