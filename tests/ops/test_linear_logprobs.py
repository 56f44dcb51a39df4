"""`linear_logprobs` against float64 written here: values, gradients, tiles, what it multiplies and holds."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import peak_memory
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlbatch_kernels import TokenRangeError, gemm, head, linear_logprobs, token_logprobs

pytestmark = pytest.mark.usefixtures("backend")


def logits_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
) -> Tensor:
    """What a model computes: head, scale, cap."""
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits * logit_scale
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


def chosen(logits: Tensor, target_ids: Tensor, temperature: float | Tensor) -> Tensor:
    divisor = temperature.to(logits.dtype).unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    return (logits / divisor).log_softmax(-1).gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def problem(num_tokens: int, vocab_size: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, ids; logits have a standard deviation of 3."""
    ids = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(4))
    weight = normal(vocab_size, width, scale=3 / math.sqrt(width), seed=1)
    return normal(num_tokens, width), weight, normal(vocab_size, seed=2), ids


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 5 tokens and 16 columns, so that small problems have many, the last ones ragged."""
    monkeypatch.setattr(head, "TOKEN_TILE", 5)
    monkeypatch.setattr(head, "TALL_TILES", 1)
    monkeypatch.setattr(head, "VOCAB_TILE", 16)


def test_worked_example_of_the_docstring(device: torch.device) -> None:
    hidden, weight = torch.tensor([[1.0]], device=device), torch.tensor([[0.0], [math.log(3)]], device=device)
    ids, mask = torch.tensor([1], device=device), torch.tensor([True], device=device)
    # Odds 1 : 3, and doubling the logits squares them: 1 : 9.
    for scale, expected in ((1.0, math.log(0.75)), (2.0, math.log(0.9))):
        found = linear_logprobs(hidden, weight, ids, temperature=1.0, mask=mask, logit_scale=scale)
        assert found.tolist() == pytest.approx([expected], abs=1e-6)


def test_scale_comes_after_bias_and_before_cap_and_temperature(device: torch.device) -> None:
    # Column 1: (1 + 1) * 3 = 6, capped at 2: 2 tanh(3), at temperature 0.5: 4 tanh(3). Column 0 is 0.
    found = linear_logprobs(
        torch.tensor([[1.0]], device=device),
        torch.tensor([[0.0], [1.0]], device=device),
        torch.tensor([1], device=device),
        temperature=0.5,
        mask=torch.tensor([True], device=device),
        bias=torch.tensor([0.0, 1.0], device=device),
        logit_scale=3.0,
        soft_cap=2.0,
    )
    assert found.item() == pytest.approx(-math.log1p(math.exp(-4 * math.tanh(3))), abs=1e-6)


# 1: nothing to normalise; 15, 16, 17: round the tile's edge; 1003: many tiles, the last one ragged.
@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 1003])
@pytest.mark.parametrize("num_tokens", [1, 5, 11])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_float32_is_no_worse_than_eager(
    device: torch.device, vocab_size: int, num_tokens: int, soft_cap: float | None
) -> None:
    hidden, weight, bias, ids = problem(num_tokens, vocab_size, 24)
    ids[0] = vocab_size - 1
    expected = chosen(
        logits_of(hidden.double(), weight.double(), bias.double(), 0.8, soft_cap), ids, temperature=0.7
    )
    eager = chosen(logits_of(hidden, weight, bias, 0.8, soft_cap), ids, temperature=0.7)
    found = linear_logprobs(
        hidden.to(device),
        weight.to(device),
        ids.to(device),
        temperature=0.7,
        mask=torch.ones(num_tokens, dtype=torch.bool, device=device),
        bias=bias.to(device),
        logit_scale=0.8,
        soft_cap=soft_cap,
    ).cpu()
    assert found.dtype == torch.float32
    assert ((found - expected).abs() <= (eager - expected).abs() + 5e-6).all()


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_arguments_give_float32_exact_logprobs(
    device: torch.device, dtype: torch.dtype
) -> None:
    hidden, weight, _, ids = problem(11, 200, 64)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    expected = chosen(logits_of(hidden.double(), weight.double(), None), ids, temperature=1.0)
    eager = chosen(logits_of(hidden, weight, None).float(), ids, temperature=1.0)
    mask = torch.ones(11, dtype=torch.bool, device=device)
    found = linear_logprobs(hidden.to(device), weight.to(device), ids.to(device), temperature=1.0, mask=mask)
    assert found.dtype == torch.float32
    assert (found.cpu() - expected).abs().max() <= 5e-6
    # Rounding the logits, as an eager half-precision head does, is far from that.
    assert (eager - expected).abs().max() > 1e-4


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize(
    ("dtype", "relative"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)]
)
def test_gradients_equal_those_of_float64(device: torch.device, dtype: torch.dtype, relative: float) -> None:
    hidden, weight, bias, ids = problem(23, 100, 32)
    rounded = [tensor.to(dtype) for tensor in (hidden, weight, bias)]
    exact = [tensor.double().requires_grad_() for tensor in rounded]
    leaves = [tensor.to(device).requires_grad_() for tensor in rounded]
    mask, upstream = torch.arange(23) % 3 != 0, normal(23, seed=9)
    found = linear_logprobs(
        leaves[0],
        leaves[1],
        ids.to(device),
        temperature=0.7,
        mask=mask.to(device),
        bias=leaves[2],
        soft_cap=6.0,
    )
    (found * upstream.to(device)).sum().backward()
    expected = chosen(logits_of(*exact, soft_cap=6.0), ids, temperature=0.7)
    (expected * upstream)[mask].sum().backward()
    for leaf, truth in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == dtype
        assert (leaf.grad.cpu().double() - truth.grad).norm() <= relative * truth.grad.norm()


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_pass_gradcheck(
    device: torch.device, soft_cap: float | None, per_token: bool, with_bias: bool
) -> None:
    hidden, weight, bias, ids = (tensor.to(device) for tensor in problem(8, 19, 4))
    mask = torch.tensor([True, True, False, True, True, True, True, False], device=device)
    temperature: Any = normal(8, seed=6).abs().to(device) + 0.5 if per_token else 0.7

    def op(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_logprobs(
            hidden,
            weight,
            ids,
            temperature=temperature,
            mask=mask,
            bias=bias,
            logit_scale=0.8,
            soft_cap=soft_cap,
        )

    tensors = (hidden, weight, bias) if with_bias else (hidden, weight)
    assert torch.autograd.gradcheck(op, tuple(tensor.double().requires_grad_() for tensor in tensors))


def test_float64_stays_float64() -> None:
    hidden, weight, bias, ids = problem(6, 40, 8)
    doubles = (hidden.double(), weight.double())
    mask = torch.ones(6, dtype=torch.bool)
    found = linear_logprobs(*doubles, ids, temperature=0.7, mask=mask, bias=bias.double())
    expected = chosen(logits_of(*doubles, bias.double()), ids, temperature=0.7)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_agrees_with_token_logprobs_over_a_leading_axis(device: torch.device) -> None:
    hidden, weight, bias, ids = (tensor.to(device) for tensor in problem(12, 5000, 16))
    mask, temperature = torch.arange(12, device=device) % 4 != 1, torch.full((12,), 0.7, device=device)
    expected = token_logprobs(logits_of(hidden, weight, bias), ids, temperature=temperature, mask=mask)
    found = linear_logprobs(
        hidden.reshape(3, 4, 16),
        weight,
        ids.reshape(3, 4),
        temperature=temperature.reshape(3, 4),
        mask=mask.reshape(3, 4),
        bias=bias,
    )
    torch.testing.assert_close(found.flatten(), expected, rtol=0, atol=5e-6)


@pytest.mark.usefixtures("_small_tiles")
def test_targets_at_every_tile_edge() -> None:
    hidden, weight, _, _ = problem(40, 40, 8)
    ids = torch.arange(40)
    found = linear_logprobs(hidden, weight, ids, temperature=1.0, mask=torch.ones(40, dtype=torch.bool))
    expected = chosen(logits_of(hidden.double(), weight.double(), None), ids, temperature=1.0)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("dead", [slice(0, 16), slice(16, 32), slice(0, 39), slice(5, 40)])
def test_a_bias_of_minus_infinity_excludes_columns_even_whole_tiles(dead: slice) -> None:
    hidden, weight, bias, _ = problem(6, 40, 8)
    bias[dead] = -math.inf
    alive = bias.isfinite().nonzero().flatten()
    ids = alive[torch.arange(6) % len(alive)]
    leaf = weight.clone().requires_grad_()
    found = linear_logprobs(
        hidden, leaf, ids, temperature=0.7, mask=torch.ones(6, dtype=torch.bool), bias=bias
    )
    position = torch.arange(6) % len(alive)
    expected = chosen(
        logits_of(hidden.double(), weight.double()[alive], bias.double()[alive]), position, temperature=0.7
    )
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)
    found.sum().backward()
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[dead].any()


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("bad_bias", [-math.inf, math.nan, math.inf])
def test_a_row_without_a_finite_normaliser_gives_nan(bad_bias: float) -> None:
    hidden, weight, bias, ids = problem(3, 40, 8)
    if bad_bias == -math.inf:
        bias[:] = bad_bias
    else:
        bias[39] = bad_bias
    found = linear_logprobs(
        hidden, weight, ids % 39, temperature=1.0, mask=torch.ones(3, dtype=torch.bool), bias=bias
    )
    assert found.isnan().all()


def test_nan_hidden_gives_nan_in_its_row_only() -> None:
    hidden, weight, _, ids = problem(3, 40, 8)
    hidden[1, 0] = math.nan
    found = linear_logprobs(hidden, weight, ids, temperature=1.0, mask=torch.ones(3, dtype=torch.bool))
    assert found.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("scale", [1e3, 1e4])
def test_large_logits_stay_exact(scale: float) -> None:
    # Whole numbers of few bits: the product is exact in float32, so what is left is the op's own error.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-3, 4, (8, 4), generator=generator).float()
    weight = torch.randint(-3, 4, (50, 4), generator=generator).float() * (scale / 36)
    weight = (weight * 4).round() / 4
    ids = torch.arange(8)
    found = linear_logprobs(hidden, weight, ids, temperature=0.7, mask=torch.ones(8, dtype=torch.bool))
    expected = chosen(logits_of(hidden.double(), weight.double(), None), ids, temperature=0.7)
    ulp = (torch.nextafter(found, torch.tensor(math.inf)) - found).abs()
    assert expected.abs().max() > scale / 10
    assert ((found - expected).abs() <= 5e-6 + ulp).all()


def test_no_tokens_and_nothing_trained_still_reach_backward(device: torch.device) -> None:
    for shape in ((0,), (2, 0), (2, 3)):
        hidden = torch.full((*shape, 4), math.nan, device=device, requires_grad=True)
        weight, bias = torch.ones(5, 4, device=device), torch.ones(5, device=device)
        weight.requires_grad_()
        bias.requires_grad_()
        ids, mask = (
            torch.full(shape, -100, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
        )
        found = linear_logprobs(hidden, weight, ids, temperature=1.0, mask=mask, bias=bias)
        assert torch.equal(found, torch.zeros(shape, device=device))
        found.sum().backward()
        for leaf in (hidden, weight, bias):
            assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.usefixtures("_small_tiles")
@given(mask=st.lists(st.booleans(), min_size=1, max_size=12), masked_id=st.integers(-(2**63), 2**63 - 1))
def test_what_lies_under_the_mask_changes_no_bit(mask: list[bool], masked_id: int) -> None:
    kept = torch.tensor(mask)
    results = []
    for filler, number in ((0.0, 0), (math.nan, masked_id)):
        hidden, weight, _, ids = problem(len(mask), 40, 8)
        hidden[~kept], ids[~kept] = filler, number
        hidden.requires_grad_()
        weight.requires_grad_()
        found = linear_logprobs(hidden, weight, ids, temperature=0.7, mask=kept)
        found.backward(torch.where(kept, 1.0, math.nan))
        results.append((found.detach(), hidden.grad, weight.grad))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)
    assert not results[0][0][~kept].any()
    assert not results[0][1][~kept].any()


def test_trained_ids_outside_the_vocabulary_are_named() -> None:
    hidden, weight, _, ids = problem(3, 40, 8)
    ids[:] = torch.tensor([40, 39, -1])
    with pytest.raises(TokenRangeError, match=r"id 40 at \(0,\), id -1 at \(2,\); expected 0 <= id < 40"):
        linear_logprobs(hidden, weight, ids, temperature=1.0, mask=torch.ones(3, dtype=torch.bool))
    linear_logprobs(hidden, weight, ids, temperature=1.0, mask=torch.tensor([False, True, False]))


class Products(TorchDispatchMode):
    """Records (m, k, n) of every matrix product, and the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # oneDNN's linear layer takes its right factor transposed.
        columns = {"aten::mm": 1, "mkldnn::_linear_pointwise": 0}.get(func._schema.name)
        if columns is not None:
            left, right = args[:2]
            self.shapes.append((left.shape[0], left.shape[1], right.shape[columns]))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.usefixtures("_small_tiles")
def test_masked_positions_cost_no_rows_of_any_product() -> None:
    hidden, weight, _, ids = problem(32, 48, 8)
    hidden.requires_grad_()
    weight.requires_grad_()
    mask = torch.arange(32) % 4 == 0
    with Products() as seen:
        linear_logprobs(hidden, weight, ids, temperature=1.0, mask=mask).sum().backward()
    # 8 of 32 trained, in two whole tiles of 5. Logits forward and again backward, gradient of hidden,
    # gradient of weight: four times 10 * 8 * 48 multiplications, where all 32 positions would be four times
    # 35 * 8 * 48.
    assert sum(m * k * n for m, k, n in seen.shapes) == 4 * 10 * 8 * 48
    assert {max(shape) for shape in seen.shapes} == {16}


@pytest.mark.usefixtures("_small_tiles")
def test_a_frozen_weight_costs_no_gradient_product_and_hidden_keeps_its_gradient() -> None:
    hidden, weight, _, ids = problem(5, 16, 8)
    mask = torch.ones(5, dtype=torch.bool)
    hidden.requires_grad_()
    with Products() as seen:
        linear_logprobs(hidden, weight, ids, temperature=1.0, mask=mask).sum().backward()
    assert seen.shapes == [(5, 8, 16), (5, 8, 16), (5, 16, 8)]
    exact = hidden.detach().double().requires_grad_()
    chosen(logits_of(exact, weight.double(), None), ids, 1.0).sum().backward()
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_no_result_of_any_operation_is_larger_than_a_tile() -> None:
    hidden, weight, _, ids = problem(1500, 9000, 4)
    hidden.requires_grad_()
    weight.requires_grad_()
    with Products() as seen:
        mask = torch.ones(1500, dtype=torch.bool)
        linear_logprobs(hidden, weight, ids, temperature=1.0, mask=mask).sum().backward()
    assert seen.largest == head.TOKEN_TILE * head.VOCAB_TILE < 1500 * 9000


def test_autocast_does_not_reach_in() -> None:
    hidden, weight, _, ids = problem(6, 40, 8)
    mask = torch.ones(6, dtype=torch.bool)
    plain = linear_logprobs(hidden, weight, ids, temperature=1.0, mask=mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_logprobs(hidden, weight, ids, temperature=1.0, mask=mask)
    assert torch.equal(found, plain)


def test_hidden_and_weight_may_differ_in_precision() -> None:
    hidden, weight, _, ids = problem(6, 40, 8)
    hidden = hidden.bfloat16()
    found = linear_logprobs(hidden, weight, ids, temperature=1.0, mask=torch.ones(6, dtype=torch.bool))
    expected = chosen(logits_of(hidden.double(), weight.double(), None), ids, temperature=1.0)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)


def test_double_backward_is_refused() -> None:
    hidden, weight, _, ids = problem(3, 10, 4)
    hidden.requires_grad_()
    found = linear_logprobs(hidden, weight, ids, temperature=1.0, mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(found.sum(), hidden, create_graph=True)


@pytest.mark.parametrize(
    ("lowest", "expected"), [(512, (512, 2048)), (1024, (1024, 2048)), (2048, (512, 512))]
)
@pytest.mark.parametrize("num_tokens", [3, 600])
def test_tiles_are_as_low_as_rows_have_the_bits_of_tall_ones_whatever_the_batch(
    monkeypatch: pytest.MonkeyPatch, lowest: int, expected: tuple[int, int], num_tokens: int
) -> None:
    # A library that splits the sums of tiles lower than `lowest`.
    monkeypatch.setattr(head, "rows_agree", lambda shape, step, dtype, device: step >= lowest)
    multiplied: list[int] = []

    def product(left: Tensor, right: Tensor) -> Tensor:
        multiplied.append(len(left))
        return left @ right.t()

    monkeypatch.setattr(head, "product", product)
    hidden, weight, _, ids = problem(num_tokens, 40, 16)
    mask = torch.ones(num_tokens, dtype=torch.bool)
    rounded: Any = {"logits_dtype": torch.bfloat16, "temperature": 1.0, "mask": mask}
    found = linear_logprobs(hidden.bfloat16(), weight.bfloat16(), ids, **rounded)
    step, tallest = expected
    assert all(rows % step == 0 and rows <= tallest for rows in multiplied)
    assert sum(multiplied) == -(-num_tokens // step) * step
    logits = (hidden.bfloat16() @ weight.bfloat16().T).float()
    torch.testing.assert_close(found, chosen(logits, ids, 1.0), rtol=0, atol=0.05)


@pytest.mark.skipif(not peak_memory.IS_KNOWN, reason="peak memory is read from /proc")
def test_peak_memory_is_tiles_where_all_logits_would_be_390_mib(backend: str) -> None:
    setup = """
T, V, D = 2048, 50_000, 32
ids, mask = torch.arange(T), torch.ones(T, dtype=torch.bool)

def both_ways(dtype, rows):
    hidden, weight = torch.zeros(rows, D, dtype=dtype), torch.zeros(V, D, dtype=dtype)
    found = linear_logprobs(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        ids[:rows],
        temperature=0.7,
        mask=mask[:rows],
        backend=backend,
    )
    found.sum().backward()

both_ways(torch.float32, 8)
"""
    case = "both_ways(torch.float32, T), both_ways(torch.bfloat16, T)"
    # Arguments, gradients and tiles: 20 to 50 MiB were seen. The rest is room for a system that takes pages
    # back while this runs.
    assert peak_memory.peak_mib(setup, case, backend) < 150


# -- float32 whatever torch is allowed -----------------------------------------------------------------------


@pytest.fixture(params=["high", "medium", "mkldnn"])
def allowed(request: pytest.FixtureRequest) -> Iterator[str]:
    """What the process lets float32 products be rounded to, as its switches say."""
    switch = torch.backends.mkldnn.matmul
    if request.param == "mkldnn":
        switch.fp32_precision = "bf16"
    else:
        torch.set_float32_matmul_precision(request.param)
    yield switch.fp32_precision
    torch.set_float32_matmul_precision("highest")
    switch.fp32_precision = "none"
    torch.backends.cuda.matmul.fp32_precision = "none"


def _error_of_float32() -> float:
    """Largest of the logprobs and, relative, of the gradient of the weight, against float64."""
    hidden, weight, _, ids = problem(64, 3000, 256)
    mask = torch.ones(64, dtype=torch.bool)
    exact = weight.double().requires_grad_()
    truth = chosen(logits_of(hidden.double(), exact, None), ids, 1.0)
    truth.sum().backward()
    leaf = weight.requires_grad_()
    found = linear_logprobs(hidden, leaf, ids, temperature=1.0, mask=mask)
    found.sum().backward()
    assert leaf.grad is not None
    assert exact.grad is not None
    worst = float((found.double() - truth).detach().abs().max())
    return max(worst, float((leaf.grad - exact.grad).abs().max() / exact.grad.abs().max()))


def test_float32_is_exact_whatever_precision_is_allowed(allowed: str) -> None:
    # Rounded to bfloat16 it is 0.03 off where the processor has such products.
    assert _error_of_float32() < 2e-5
    assert torch.backends.mkldnn.matmul.fp32_precision == allowed


def test_float32_is_exact_in_every_thread_and_the_switch_is_back_after(allowed: str, backend: str) -> None:
    if backend == "triton":
        pytest.skip("Triton's interpreter serves one thread at a time")
    with ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(lambda _: _error_of_float32(), range(12)))
    assert max(errors) < 2e-5
    assert torch.backends.mkldnn.matmul.fp32_precision == allowed


def test_the_switch_is_back_after_an_error(allowed: str) -> None:
    within = gemm.exact_products(torch.ones(1))
    with pytest.raises(KeyError), within:
        raise KeyError
    assert torch.backends.mkldnn.matmul.fp32_precision == allowed
