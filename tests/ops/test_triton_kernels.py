"""Triton's kernels: on a GPU where there is one, else on the interpreter (`TRITON_INTERPRET=1`)."""

import math
import os
from decimal import Decimal, localcontext

import pytest
import torch
from statistics_by_torch import assert_equal_tables, troubled_batch
from torch import Tensor

from rlbatch_kernels import (
    STAT_COLUMNS,
    alignment_stats,
    alignment_stats_and_ratio,
    token_statistics,
    triton_library,
)

if triton_library.missing() is not None:
    pytest.skip(str(triton_library.missing()), allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN = math.nan


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """Where kernels run here."""
    if INTERPRETED:
        import interpreter

        interpreter.start_test()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine, and TRITON_INTERPRET is not set")
    return torch.device("cuda")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def three(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob, log-sum-exp and entropy at temperature 0.7 by their definitions."""
    logs = (logits / 0.7).log_softmax(-1)
    entropy = -torch.where(logs == -math.inf, 0.0, logs.exp() * logs).sum(-1)
    return logs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), (logits / 0.7).logsumexp(-1), entropy


def run(logits: Tensor, ids: Tensor, **options: bool):
    mask = torch.ones(ids.shape, dtype=torch.bool, device=logits.device)
    return token_statistics(
        logits, ids.to(logits.device), temperature=0.7, mask=mask, backend="triton", **options
    )


def test_triton_entropy_stays_a_number_after_the_largest_jump_there_is(device: torch.device) -> None:
    logits = normal(1, 9000)
    logits[0, 8999] = 3e38
    found = run(logits.to(device), torch.tensor([8999]))
    assert found.logprobs.item() == 0
    assert found.entropy.item() == 0


# 1: one lane; 15 to 17: unaligned and aligned rows; 4095 to 4097: round a block; 8208: two whole blocks and
# an aligned tail; 12301: two and an unaligned one.
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 4095, 4096, 4097, 8208, 12301])
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_statistics_and_gradients_equal_float64(
    device: torch.device, vocab_size: int, dtype: torch.dtype
) -> None:
    logits = normal(4, vocab_size).to(dtype)
    ids = torch.tensor([0, vocab_size - 1, vocab_size // 2, 0])
    if vocab_size > 1:
        logits[2, : vocab_size // 2] = -math.inf
    exact, leaf = logits.double().requires_grad_(), logits.to(device).requires_grad_()
    found, expected = run(leaf, ids), three(exact, ids)
    for ours, truth in zip(found[:3], expected, strict=True):
        assert ((ours.cpu().double() - truth).abs() <= 5e-6 + 2**-23 * truth.abs()).all()
    rank = (logits > logits.gather(-1, ids.unsqueeze(-1))).sum(-1) + 1
    assert torch.equal(found.rank.cpu(), rank)
    weights = [normal(4, seed=seed) for seed in (3, 4, 5)]
    sum((ours * w.to(device)).sum() for ours, w in zip(found[:3], weights, strict=True)).backward()
    sum((truth * w).sum() for truth, w in zip(expected, weights, strict=True)).backward()
    # One rounding of the result: units of 2^-8 and 2^-11.
    relative = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    error = (leaf.grad.cpu().double() - exact.grad).nan_to_num().norm()
    assert leaf.grad.isfinite().all()
    assert error <= relative * exact.grad.nan_to_num().norm()


# 4112 is a multiple of 16 and 4099 is not: rows read in vectors, and lane by lane.
@pytest.mark.parametrize("vocab_size", [4112, 4099])
def test_a_row_alone_has_the_same_bits_under_triton_as_in_its_batch(
    device: torch.device, vocab_size: int
) -> None:
    logits, ids = normal(7, vocab_size).to(torch.bfloat16).to(device).requires_grad_(), torch.arange(7)
    together = run(logits, ids)
    (grad,) = torch.autograd.grad((together.logprobs + together.entropy).sum(), logits)
    for row in (0, 3, 6):
        leaf = logits[row : row + 1].detach().clone().requires_grad_()
        alone = run(leaf, ids[row : row + 1])
        assert all(torch.equal(one[0], every[row]) for one, every in zip(alone, together, strict=True))
        (alone.logprobs + alone.entropy).sum().backward()
        assert torch.equal(leaf.grad[0], grad[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "width"), [(3, 37), (16, 4112)])
def test_triton_gradients_in_place_touch_only_their_rows(
    device: torch.device, dtype: torch.dtype, first: int, width: int
) -> None:
    around = torch.full((5, 4160), NAN, dtype=dtype, device=device)
    inside = around[1:4, first : first + width]
    inside.copy_(normal(3, width))
    kept = around.clone()
    leaf, ids = inside.contiguous().requires_grad_(), torch.tensor([0, width - 1, 5])
    run(leaf, ids).logprobs.sum().backward()
    view = inside.requires_grad_().view_as(inside)
    (grad,) = torch.autograd.grad(run(view, ids, in_place_backward=True).logprobs.sum(), view)
    assert grad.data_ptr() == inside.data_ptr()
    assert torch.equal(inside, leaf.grad)
    outside = torch.ones(5, 4160, dtype=torch.bool, device=device)
    outside[1:4, first : first + width] = False
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(around.detach().view(bits)[outside], kept.view(bits)[outside])


# 511 to 513: round a block; 4095 to 4097: round a piece, its partners on the other side; 8999: three pieces.
@pytest.mark.parametrize("length", [0, 1, 2, 511, 512, 513, 4095, 4096, 4097, 8999])
def test_triton_segments_equal_torch_in_float64(device: torch.device, length: int) -> None:
    batch = troubled_batch(2, 9000)
    segments = torch.tensor([(row, at, at + length, 0) for row in range(2) for at in (0, 9000 - length)])
    found = alignment_stats_and_ratio(*(value.to(device) for value in batch), segments, backend="triton")
    exact = alignment_stats_and_ratio(batch[0].double(), batch[1].double(), batch[2], segments)
    assert_equal_tables(found.table.cpu(), exact.table)
    torch.testing.assert_close(found.ratio.cpu().double(), exact.ratio, rtol=1e-6, atol=0)


def test_a_segment_has_the_same_bits_under_triton_wherever_it_lies(device: torch.device) -> None:
    batch = [value.to(device) for value in troubled_batch(2, 5000)]
    together = alignment_stats(*batch, torch.tensor([(1, 0, 9, 0), (0, 0, 4500, 0)]), backend="triton")
    # Three columns further on: other alignments, and another length of the row.
    moved = [torch.nn.functional.pad(value[:1], (3, 0), value=1) for value in batch]
    alone = alignment_stats(*moved, torch.tensor([(0, 3, 4503, 0)]), backend="triton")
    assert torch.equal(alone[0], together[1])


def test_triton_k3_of_one_token_is_right_to_a_millionth(device: torch.device) -> None:
    ladder = torch.logspace(-6, 1, 29, dtype=torch.float64).float()
    values = torch.cat([ladder, -ladder, torch.tensor([1.0, -1.0, 1.0000001, 2.0])])
    # Each token is a segment of one row.
    segments = torch.tensor([(0, at, at + 1, 0) for at in range(len(values))])
    trainer = values.unsqueeze(0).to(device)
    table = alignment_stats(
        trainer, torch.zeros_like(trainer), trainer == trainer, segments, backend="triton"
    )
    for value, found in zip(values.tolist(), table[:, STAT_COLUMNS.index("sum_k3")].tolist(), strict=True):
        with localcontext() as context:
            context.prec = 60
            truth = Decimal(value).exp() - 1 - Decimal(value)
        assert abs(Decimal(found) - truth) <= Decimal("1e-6") * truth, value
