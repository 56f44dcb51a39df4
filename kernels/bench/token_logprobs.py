"""`token_logprobs` and `token_statistics` beside reading the logits once, and float().log_softmax + gather.

    python kernels/bench/token_logprobs.py [--quick] [--threads N]

Reading the logits once is a sum over their bytes seen as float32. The error is against float64 of the same
logits, at logits of standard deviation 3 and at +-1e4.
"""

import harness
import torch
from torch import Tensor

from rlbatch_kernels import last_backend, token_logprobs, token_statistics

SHAPE, QUICK_SHAPE = (4096, 32_000), (1024, 32_000)
MEMORY_SHAPE = (1024, 50_000)
TEMPERATURE = 0.7


def problem(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets, and a mask that trains all."""
    logits = (torch.randn(shape) * 3).to(dtype)
    return logits, torch.randint(shape[1], shape[:1]), torch.ones(shape[0], dtype=torch.bool)


def log_softmax(logits: Tensor, ids: Tensor) -> Tensor:
    return (logits.float() / TEMPERATURE).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def read_once(logits: Tensor) -> harness.Case:
    words = logits.view(torch.float32)
    return words.sum


def forward_times(shape: tuple[int, int], dtype: torch.dtype, runs: int) -> dict[str, float]:
    logits, ids, mask = problem(shape, dtype)
    return harness.medians(
        {
            "token_statistics": lambda: token_statistics(logits, ids, temperature=TEMPERATURE, mask=mask),
            "token_logprobs": lambda: token_logprobs(logits, ids, temperature=TEMPERATURE, mask=mask),
            "read once": read_once(logits),
            "float().log_softmax": lambda: log_softmax(logits, ids),
        },
        runs,
    )


def peak_multiple(in_place: bool) -> float | None:
    """Peak memory of forward and backward beyond the logits, in multiples of them."""
    leaf, ids, mask = problem(MEMORY_SHAPE, torch.bfloat16)
    leaf.requires_grad_()

    def run(leaf: Tensor, ids: Tensor, mask: Tensor) -> None:
        # The output of a model, not a leaf; it shares the leaf's storage.
        logits = leaf.view_as(leaf)
        found = token_logprobs(logits, ids, temperature=TEMPERATURE, mask=mask, in_place_backward=in_place)
        torch.autograd.grad(found.sum(), logits)

    run(leaf[:8], ids[:8], mask[:8])
    peak = harness.peak_mib(lambda: run(leaf, ids, mask))
    return None if peak is None else peak / (leaf.nbytes / 2**20)


def max_abs_error() -> float:
    """Nats, of float32 logits, beside float64."""
    worst = 0.0
    for offset in (0.0, 1e4, -1e4):
        logits, ids, mask = problem((64, 151_936), torch.float32)
        logits += offset
        scaled = logits.double() / TEMPERATURE
        truth = scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)
        found = token_logprobs(logits, ids, temperature=TEMPERATURE, mask=mask)
        worst = max(worst, (found.double() - truth).abs().max().item())
    return worst


def main() -> None:
    given = harness.arguments(__doc__ or "")
    shape, runs = (QUICK_SHAPE, harness.QUICK_RUNS) if given.quick else (SHAPE, harness.RUNS)
    rows: dict[str, float] = {}
    figures: dict[str, float | int | None] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        times = forward_times(shape, dtype, runs)
        figures[f"read_multiple_{name}"] = harness.ratio(times, "token_statistics", "read once")
        figures[f"vs_log_softmax_{name}"] = harness.ratio(times, "float().log_softmax", "token_statistics")
        rows |= {f"{case} {list(shape)} {name}": seconds for case, seconds in times.items()}
    figures["peak_multiple"] = peak_multiple(in_place=False)
    figures["peak_multiple_in_place"] = peak_multiple(in_place=True)
    figures["max_abs_error"] = max_abs_error()
    print(f"backend {last_backend('token_statistics')}, {torch.get_num_threads()} threads")
    harness.report(rows, figures)


if __name__ == "__main__":
    main()
