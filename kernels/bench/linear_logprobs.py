"""`linear_logprobs` beside its bare GEMM, naive torch, and the fused heads of other trainers.

    python kernels/bench/linear_logprobs.py [--quick] [--threads N]

The bare GEMM is torch's product of the same hidden states with the same weights, in blocks of 4096 columns.
The bfloat16 figures hold logits in bfloat16, as every peer does; `exact_gemm_multiple_bf16` is the default,
whose logits are float32. Forward and backward give the gradients of hidden states and weights, where the
ideal is four GEMMs: logits, logits again, and one for each gradient.

What the hardware allows stands beside each bar: `bound` is the time of these GEMMs alone, in tiles of the
shapes that the op uses, and `..._at_most` the figure that an op would reach that took no other time.
"""

import math

import harness
import torch
from torch import Tensor

from rlbatch_kernels import gemm, head, last_backend, linear_logprobs

SHAPE, QUICK_SHAPE = (4096, 1024, 32_000), (2048, 1024, 8_192)
MEMORY_SHAPE = (2048, 256, 50_000)
BLOCK = 4096
TEMPERATURE = 0.7


class Problem:
    """Hidden states, weights and targets of one dtype."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        num_tokens, width, vocab_size = shape
        self.hidden = torch.randn(num_tokens, width).to(dtype)
        self.weight = (torch.randn(vocab_size, width) * 3 / math.sqrt(width)).to(dtype)
        self.ids = torch.randint(vocab_size, (num_tokens,))
        self.all_trained = torch.ones(num_tokens, dtype=torch.bool)
        self.quarter_trained = torch.arange(num_tokens) % 4 == 0

    def gemm(self) -> None:
        for first in range(0, len(self.weight), BLOCK):
            torch.mm(self.hidden, self.weight[first : first + BLOCK].t())

    def products(self, *, backward: bool) -> None:
        """The GEMMs of forward, and of backward too where asked for, in the op's tiles, and nothing else."""
        tall = head.TOKEN_TILE * (head.TALL_TILES if self.hidden.dtype == torch.bfloat16 else 1)
        for weight in self.weight.split(head.VOCAB_TILE):
            for hidden in self.hidden.split(tall):
                logits = gemm.product(hidden, weight)
                if backward:
                    gemm.product(hidden, weight)
                    gemm.product(logits, weight.t())
                    gemm.product(logits.t(), hidden.t())

    def ours(self, mask: Tensor, logits_dtype: torch.dtype | None = None) -> Tensor:
        return linear_logprobs(
            self.hidden, self.weight, self.ids, temperature=TEMPERATURE, mask=mask, logits_dtype=logits_dtype
        )

    def naive(self) -> Tensor:
        logits = (self.hidden @ self.weight.t()).float() / TEMPERATURE
        return logits.log_softmax(-1).gather(-1, self.ids.unsqueeze(-1)).squeeze(-1)

    def with_backward(self, forward: harness.Case) -> harness.Case:
        def run() -> None:
            self.hidden.requires_grad_()
            self.weight.requires_grad_()
            found = forward()
            torch.autograd.grad(found.sum(), (self.hidden, self.weight))  # type: ignore[attr-defined]
            self.hidden.requires_grad_(False)
            self.weight.requires_grad_(False)

        return run


def verl(problem: Problem) -> harness.Case:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    fused = FusedLinearForPPO()
    ids = problem.ids.unsqueeze(0)
    return lambda: fused(problem.hidden.unsqueeze(0), problem.weight, ids, temperature=TEMPERATURE)[0]


def liger(problem: Problem) -> harness.Case:
    from liger_kernel.chunked_loss import fused_linear_ppo

    # What its GRPO loss calls for its logprobs.
    function = fused_linear_ppo._ChunkedSelectiveLogProbFunction
    columns = fused_linear_ppo._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE
    return lambda: function.apply(problem.hidden, problem.weight, problem.ids, None, TEMPERATURE, columns)


def trl(problem: Problem) -> harness.Case:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as COLUMNS

    arguments = (problem.hidden, problem.weight, None, problem.ids, TEMPERATURE, COLUMNS, None, 1.0, ())
    return lambda: ChunkedLogProbFunction.apply(*arguments)[0]


def prime_rl(problem: Problem) -> harness.Case:
    from prime_rl.trainer.models.layers.lm_head import FusedOutputLinear

    # Its default chunk. The weight is a plain tensor here, whose gradient is asked for like ours.
    head = FusedOutputLinear(problem.hidden.shape[1], 1, chunk_size=8192)
    del head.weight
    head.weight = problem.weight
    temperature, ids = torch.full(problem.ids.shape, TEMPERATURE).unsqueeze(0), problem.ids.unsqueeze(0)
    return lambda: head(problem.hidden.unsqueeze(0), ids, temperature)["logprobs"]


def cut_cross_entropy(problem: Problem) -> harness.Case:
    from cut_cross_entropy import linear_cross_entropy

    def run() -> Tensor:
        # It has no temperature. The kernels are for CUDA; this is its path for the CPU.
        scaled = problem.hidden / TEMPERATURE
        loss: Tensor = linear_cross_entropy(
            scaled, problem.weight, problem.ids, reduction="none", impl="torch_compile"
        )
        return -loss

    return run


def transient_mib() -> float | None:
    problem = Problem(MEMORY_SHAPE, torch.bfloat16)
    # Once before: which tiles may be tall is tried at the first call of a shape.
    problem.ours(problem.all_trained)
    return harness.peak_mib(lambda: problem.ours(problem.all_trained))


def half_precision(
    shape: tuple[int, int, int], runs: int
) -> tuple[dict[str, float], dict[str, float | None]]:
    problem, bf16 = Problem(shape, torch.bfloat16), torch.bfloat16
    times = harness.medians(
        {
            "ours, bf16 logits": lambda: problem.ours(problem.all_trained, bf16),
            "GEMM": problem.gemm,
            "ours, 25 % trained": lambda: problem.ours(problem.quarter_trained, bf16),
            "ours, float32 logits": lambda: problem.ours(problem.all_trained),
        },
        runs,
    )
    figures = {
        "gemm_multiple_bf16": harness.ratio(times, "ours, bf16 logits", "GEMM"),
        "exact_gemm_multiple_bf16": harness.ratio(times, "ours, float32 logits", "GEMM"),
        "masked_time_fraction": harness.ratio(times, "ours, 25 % trained", "ours, bf16 logits"),
    }
    return times, figures


def both_ways(shape: tuple[int, int, int], runs: int) -> tuple[dict[str, float], dict[str, float | None]]:
    problem, bf16 = Problem(shape, torch.bfloat16), torch.bfloat16
    peers = {name: harness.peer(lambda find=find: find(problem)) for name, find in PEERS.items()}
    cases = {"ours": lambda: problem.ours(problem.all_trained, bf16), **peers}
    times = harness.medians(
        {
            "GEMM ": problem.gemm,
            "bound, both ways": lambda: problem.products(backward=True),
            **{f"{name}, both ways": case and problem.with_backward(case) for name, case in cases.items()},
        },
        runs,
    )
    figures = {"fwd_bwd_multiple": harness.ratio(times, "ours, both ways", "GEMM ")}
    figures["fwd_bwd_multiple_at_least"] = harness.ratio(times, "bound, both ways", "GEMM ")
    for name in peers:
        figures[f"vs_{name}"] = harness.ratio(times, f"{name}, both ways", "ours, both ways")
        figures[f"vs_{name}_at_most"] = harness.ratio(times, f"{name}, both ways", "bound, both ways")
    ours, theirs = (beyond_gradients(problem, cases[name]) for name in ("ours", "cut_cross_entropy"))
    figures["peak_fraction_of_cut_cross_entropy"] = ours / theirs if ours and theirs else None
    return times, figures


def beyond_gradients(problem: Problem, case: harness.Case | None) -> float | None:
    """MiB at the peak of forward and backward, less the gradients themselves."""
    peak = case and harness.peak_mib(problem.with_backward(case))
    return peak and peak - (problem.hidden.nbytes + problem.weight.nbytes) / 2**20


def single_precision(
    shape: tuple[int, int, int], runs: int
) -> tuple[dict[str, float], dict[str, float | None]]:
    problem = Problem(shape, torch.float32)
    times = harness.medians(
        {
            "ours, float32": lambda: problem.ours(problem.all_trained),
            "naive, float32": problem.naive,
            "GEMM, float32": problem.gemm,
            "bound, float32": lambda: problem.products(backward=False),
        },
        runs,
    )
    figures = {
        "fp32_vs_naive": harness.ratio(times, "naive, float32", "ours, float32"),
        "fp32_vs_naive_at_most": harness.ratio(times, "naive, float32", "bound, float32"),
        "gemm_multiple_fp32": harness.ratio(times, "ours, float32", "GEMM, float32"),
    }
    return times, figures


PEERS = {
    "trl": trl,
    "verl": verl,
    "prime_rl": prime_rl,
    "liger": liger,
    "cut_cross_entropy": cut_cross_entropy,
}


def main() -> None:
    given = harness.arguments(__doc__ or "")
    shape, runs = (QUICK_SHAPE, harness.QUICK_RUNS) if given.quick else (SHAPE, harness.RUNS)
    rows: dict[str, float] = {}
    figures: dict[str, float | int | None] = {}
    for part in (half_precision, both_ways, single_precision):
        times, found = part(shape, runs)
        rows |= times
        figures |= found
    figures["transient_mib"] = transient_mib()
    print(f"{list(shape)} (tokens, width, vocabulary), backend {last_backend('linear_logprobs')}, ", end="")
    print(f"{torch.get_num_threads()} threads")
    harness.report(rows, figures)


if __name__ == "__main__":
    main()
