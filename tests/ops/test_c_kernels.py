"""The C kernels: every processor level, any number of threads, and not a byte outside what they are given."""

import math
import subprocess
import sys
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from statistics_by_torch import assert_equal_tables, troubled_batch
from torch import Tensor

from rlbatch_kernels import (
    LAGS,
    STAT_COLUMNS,
    alignment_stats,
    c_library,
    c_stats,
    column,
    stats,
    token_statistics,
)
from rlbatch_kernels.per_token import PolicyLoss, Written

pytestmark = pytest.mark.skipif(c_library.missing() is not None, reason="the C library was not built")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN = math.nan


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each level that was compiled and that this processor has."""
    names = [
        c_library.functions().rlb_level_name(number).decode()
        for number in range(c_library.functions().rlb_num_levels())
    ]
    if request.param not in names:
        pytest.skip(f"this processor or build has {', '.join(names)} only")
    monkeypatch.setattr(c_library, "level", lambda: names.index(request.param))
    return str(request.param)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def three(logits: Tensor, ids: Tensor, temperature: float = 0.7) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob, log-sum-exp and entropy by their definitions."""
    logs = (logits / temperature).log_softmax(-1)
    entropy = -torch.where(logs == -math.inf, 0.0, logs.exp() * logs).sum(-1)
    return logs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), (logits / temperature).logsumexp(-1), entropy


def run(logits: Tensor, ids: Tensor, **options: Any):
    mask = torch.ones(ids.shape, dtype=torch.bool)
    return token_statistics(logits, ids, temperature=0.7, mask=mask, backend="c", **options)


# 1 and 15: less than a vector; 16, 17, 64, 65: round one and four of them; 1003; 4097: over four blocks.
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 64, 65, 1003, 4097])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_level_equals_float64(level: str, vocab_size: int, dtype: torch.dtype) -> None:
    logits = normal(5, vocab_size).to(dtype)
    ids = torch.tensor([0, vocab_size - 1, vocab_size // 2, 0, vocab_size // 3])
    if vocab_size > 1:
        logits[3, 1:] = -math.inf
    exact, leaf = logits.double().requires_grad_(), logits.clone().requires_grad_()
    found, expected = run(leaf, ids), three(exact, ids)
    for ours, truth in zip(found[:3], expected, strict=True):
        assert ((ours.double() - truth).abs() <= 5e-6 + 2**-23 * truth.abs()).all()
    rank = (logits > logits.gather(-1, ids.unsqueeze(-1))).sum(-1) + 1
    assert torch.equal(found.rank, rank)
    weights = [normal(5, seed=seed) for seed in (3, 4, 5)]
    sum((ours * weight).sum() for ours, weight in zip(found[:3], weights, strict=True)).backward()
    sum((truth * weight).sum() for truth, weight in zip(expected, weights, strict=True)).backward()
    # Autograd makes NaN of the row of one column and -inf, where only the log-sum-exp depends on a logit.
    exact.grad[3] = 0.0
    exact.grad[3, 0] = weights[1][3] / 0.7
    # One rounding of the result: units of 2^-8 and 2^-11; and float32's own error over entropy's terms.
    relative = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert (leaf.grad.double() - exact.grad).norm() <= relative * exact.grad.norm()


# 1 to 17: less than a vector of some level, or one more; 1024 and 1029: one block, and a ragged second.
@pytest.mark.parametrize("vocab_size", [1, 3, 4, 7, 17, 1024, 1029])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_level_caps_and_masks_as_float64_does(level: str, vocab_size: int, dtype: torch.dtype) -> None:
    logits, ids = (normal(3, vocab_size) * 3).to(dtype), torch.tensor([0, vocab_size - 1, vocab_size // 2])
    leaf, counts = logits.clone().requires_grad_(), torch.arange(vocab_size) % 5 != 1
    counts[ids] = True
    exact = logits[:, counts].double().requires_grad_()
    found = run(leaf, ids, soft_cap=12.0, vocab_mask=counts)
    expected = three(12 * torch.tanh(exact / 12), (counts.cumsum(0) - 1)[ids])
    for ours, truth in zip(found[:3], expected, strict=True):
        assert ((ours.double() - truth).abs() <= 5e-6 + 2**-23 * truth.abs()).all()
    sum((ours * (at + 1)).sum() for at, ours in enumerate(found[:3])).backward()
    sum((truth * (at + 1)).sum() for at, truth in enumerate(expected)).backward()
    relative = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert not leaf.grad[:, ~counts].any()
    assert (leaf.grad[:, counts].double() - exact.grad).norm() <= relative * exact.grad.norm()


def test_every_level_touches_nothing_beside_a_row_that_it_shapes(level: str) -> None:
    around, counts = torch.full((3, 64), NAN), torch.ones(21, dtype=torch.bool)
    inside = around[1:2, 5:26]
    inside.copy_(normal(1, 21))
    kept, view = around.clone(), inside.requires_grad_().view_as(inside)
    found = run(view, torch.tensor([20]), soft_cap=9.0, vocab_mask=counts, in_place_backward=True)
    found.logprobs.sum().backward()
    outside = torch.ones(3, 64, dtype=torch.bool)
    outside[1, 5:26] = False
    bits = torch.int32
    assert torch.equal(around.detach().view(bits)[outside], kept.detach().view(bits)[outside])
    assert not torch.equal(around.detach()[1, 5:26], kept.detach()[1, 5:26])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_is_widened_exactly(level: str, dtype: torch.dtype) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.int16)
    logits = bits.view(dtype).unsqueeze(-1)
    finite = logits.isfinite().squeeze(-1)
    mask = torch.ones(2**16, dtype=torch.bool)
    found = token_statistics(
        logits, torch.zeros(2**16, dtype=torch.int64), temperature=1.0, mask=mask, backend="c"
    )
    # Of one column the log-sum-exp is the logit.
    assert torch.equal(found.log_sum_exp[finite], logits.squeeze(-1)[finite].float())
    assert found.logprobs[~finite].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_rounded_to_the_nearest_half(level: str, dtype: torch.dtype) -> None:
    logits, ids = normal(40, 33).to(dtype), torch.arange(40) % 33
    # From what float16 has only as 0 or subnormals to what it has only as inf.
    upstream = 10.0 ** torch.linspace(-9, 6, 40)
    narrow, wide = logits.clone().requires_grad_(), logits.float().requires_grad_()
    (run(narrow, ids).logprobs * upstream).sum().backward()
    (run(wide, ids).logprobs * upstream).sum().backward()
    assert torch.equal(narrow.grad, wide.grad.to(dtype))
    assert narrow.grad.isinf().any() == (dtype == torch.float16)


# A segment is 16 tokens of AVX-512 (4, 8 of the others), clean blocks up to every 1024th token, and what
# lacks a partner: 17 to 34 have none or one vector of it, 1025 to 2067 one or two blocks, whole or not; 63 to
# 66 and 130 have a window more or less.
@pytest.mark.parametrize(
    "length",
    [0, 1, 2, 15, 16, 17, 18, 19, 33, 34, 63, 64, 65, 66, 130, 530, 1025, 1026, 1027, 1042, 2050, 2067, 3000],
)
def test_statistics_of_every_level_equal_torch(level: str, length: int) -> None:
    batch = troubled_batch(3, 3000)
    segments = torch.tensor([(row, at, at + length, 0) for row in range(3) for at in (0, 3000 - length)])
    found = alignment_stats(*batch, segments, backend="c")
    exact = alignment_stats(*batch, segments, backend="torch")
    assert_equal_tables(found, exact)


def test_a_residual_is_clipped_at_lag_0_of_a_clean_block_too(level: str) -> None:
    trainer, inference = torch.full((1, 600), -1.0), torch.full((1, 600), -1.5)
    trainer[0, 300] = -11.5
    table = alignment_stats(
        trainer, inference, torch.ones(1, 600, dtype=torch.bool), torch.tensor([(0, 0, 600, 0)]), backend="c"
    )
    # 599 of 0.5 and one of 10, which counts as 4; a lag loses |lag| pairs of 0.5 at the ends.
    for lag in LAGS:
        assert column(table, f"residual_sum_{lag}").item() == 599 * 0.5 + 4.0 - 0.5 * abs(lag)
    assert column(table, "sum_abs_log_ratio").item() == 599 * 0.5 + 10.0


def test_k3_of_one_token_and_of_a_clean_block_is_right_to_a_millionth(level: str) -> None:
    ladder = torch.logspace(-6, 1, 200, dtype=torch.float64).float()
    values = torch.cat([ladder, -ladder, torch.tensor([0.25, 1.0, 1.0000001, -1.0])])
    alone = values.unsqueeze(-1)
    blocks = alone.expand(-1, 600).contiguous()
    for trainer, num_tokens in ((alone, 1), (blocks, 600)):
        segments = torch.tensor([(row, 0, num_tokens, 0) for row in range(len(values))])
        table = alignment_stats(trainer, torch.zeros_like(trainer), trainer == trainer, segments, backend="c")
        for value, found in zip(
            values.tolist(), table[:, STAT_COLUMNS.index("sum_k3")].tolist(), strict=True
        ):
            with localcontext() as context:
                context.prec = 60
                truth = (Decimal(value).exp() - 1 - Decimal(value)) * num_tokens
            assert abs(Decimal(found) - truth) <= Decimal("1e-6") * truth, value


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    # 150,000: three chunks of one segment.
    batch = troubled_batch(2, 150_000)
    segments = torch.tensor([(0, 0, 150_000, 0), (1, 7, 149_000, 0), (0, 3, 9, 1)])
    logits, ids = normal(23, 3001).to(torch.bfloat16), torch.arange(23)
    results = []
    for count in (1, threads):
        monkeypatch.setattr(c_library, "num_threads", lambda elements, count=count: count)
        leaf = logits.clone().requires_grad_()
        found = run(leaf, ids)
        (found.logprobs + found.entropy).sum().backward()
        results.append((alignment_stats(*batch, segments, backend="c"), *found, leaf.grad))
    for one, many in zip(*results, strict=True):
        assert torch.equal(one, many)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_has_the_same_bits_as_in_its_batch(dtype: torch.dtype) -> None:
    logits, ids = normal(9, 1003).to(dtype).requires_grad_(), torch.arange(9)
    together = run(logits, ids)
    (grad,) = torch.autograd.grad(together.logprobs.sum(), logits)
    for row in range(9):
        # Other addresses, and so other alignments, for each row.
        leaf = torch.cat([torch.zeros(row, dtype=dtype), logits[row].detach()])[row:].unsqueeze(0)
        leaf.requires_grad_()
        alone = run(leaf, ids[row : row + 1])
        assert all(torch.equal(one[0], all_of[row]) for one, all_of in zip(alone, together, strict=True))
        alone.logprobs.sum().backward()
        assert torch.equal(leaf.grad[0], grad[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_larger_tensor_are_read_and_written_to_their_edges_only(dtype: torch.dtype) -> None:
    around = torch.full((6, 50), NAN, dtype=dtype)
    inside = around[1:5, 3:40]
    inside.copy_(normal(4, 37))
    kept = around.clone()
    leaf = inside.contiguous().requires_grad_()
    ids = torch.tensor([0, 36, 5, 9])
    expected = run(leaf, ids)
    expected.logprobs.sum().backward()
    # Through an operation, so that the view is no leaf and the gradient may overwrite it.
    view = inside.requires_grad_().view_as(inside)
    found = run(view, ids, in_place_backward=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    (grad,) = torch.autograd.grad(found.logprobs.sum(), view)
    assert torch.equal(grad, leaf.grad)
    assert grad.data_ptr() == inside.data_ptr()
    assert torch.equal(inside, leaf.grad)
    outside = torch.ones(6, 50, dtype=torch.bool)
    outside[1:5, 3:40] = False
    width = {torch.float32: torch.int32}.get(dtype, torch.int16)
    assert torch.equal(around.detach().view(width)[outside], kept.view(width)[outside])


@pytest.mark.parametrize("length", [1, 17, 1024, 1058, 2100])
def test_statistics_touch_nothing_round_their_arguments(length: int) -> None:
    trainer, inference, mask = (tensor[1:] for tensor in troubled_batch(2, length))
    segments = torch.tensor([(0, 0, length, 0)])

    def amid(tensor: Tensor, filler: float) -> Tensor:
        whole = torch.full((length + 64,), filler, dtype=tensor.dtype)
        whole[32 : 32 + length] = tensor[0]
        return whole

    sides = [amid(trainer, NAN), amid(inference, NAN), amid(mask, 1), amid(torch.zeros(1, length), 7.0)]
    *views, ratio = (whole[32 : 32 + length].unsqueeze(0) for whole in sides)
    table = c_stats.segment_stats(*views, segments, Written(out=ratio))
    assert torch.equal(table, alignment_stats(trainer, inference, mask, segments, backend="c"))
    assert (sides[3][:32] == 7).all()
    assert (sides[3][32 + length :] == 7).all()
    torch.testing.assert_close(ratio, (trainer - inference).exp(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["clip", "cap"])
@pytest.mark.parametrize("length", [3, 16, 1500])
def test_policy_gradients_of_every_level_equal_torch(level: str, kind: str, length: int) -> None:
    batch = [tensor[:, :length].contiguous() for tensor in troubled_batch(2, 1500)]
    segments = torch.tensor([(row, 0, length, 0) for row in range(2)])
    loss, advantages = PolicyLoss(kind=kind, low=0.9, high=1.05), normal(2, length, seed=7)
    found, exact = (torch.full((2, length), 7.0) for _ in range(2))
    for module, out in ((c_stats, found), (stats, exact)):
        module.segment_stats(*batch, segments, Written(out=out, loss=loss, advantages=advantages))
    torch.testing.assert_close(found, exact, rtol=3e-6, atol=0, equal_nan=True)


def test_the_limits_are_those_of_the_reference() -> None:
    assert c_stats.LIMITS.residual_clip == stats.RESIDUAL_CLIP
    assert c_stats.LIMITS.zero_needs_below == stats.ZERO_NEEDS_BELOW
    assert c_stats.LIMITS.confident_from == stats.CONFIDENT_FROM
    assert c_stats.LIMITS.window_least == stats.WINDOW_LEAST


WITHOUT_TORCH = """
import ctypes, random, struct, sys
lib = ctypes.CDLL(sys.argv[1])
n = 200_000
random.seed(0)
inference = (ctypes.c_float * n)(*[-random.expovariate(1.0) for _ in range(n)])
trainer = (ctypes.c_float * n)(*[value + random.gauss(0, 0.01) for value in inference])
mask = (ctypes.c_uint8 * n)(*[1] * n)
segments = (ctypes.c_int64 * 8)(0, 0, n, 0, 0, 5, n, 0)
limits = (ctypes.c_float * 7)(20.0, 1.0, -1e-3, -0.69, 2.0, 4.0, 0.02)
tables = []
for threads in (1, 4):
    table = (ctypes.c_double * 58)()
    failed = lib.rlb_alignment_stats(
        trainer, inference, mask, None, ctypes.c_int64(n), segments, ctypes.c_int64(2), limits, table,
        0, threads,
    )
    assert failed == 0
    tables.append(list(table))
assert "torch" not in sys.modules
assert tables[0] == tables[1] and tables[0][0] == n, tables
"""


def test_without_torchs_threads_the_kernels_start_their_own() -> None:
    path = c_library.functions()._name
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
