"""`token_statistics`, gradients in place, and logits in bfloat16."""

import math

import pytest
import torch
from torch import Tensor

from rlbatch_kernels import (
    DtypeError,
    TokenStatistics,
    linear_logprobs,
    token_logprobs,
    token_statistics,
)

pytestmark = pytest.mark.usefixtures("backend")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def everything(logits: Tensor, ids: Tensor, **options: object) -> TokenStatistics:
    mask = torch.ones(ids.shape, dtype=torch.bool, device=ids.device)
    return token_statistics(logits, ids, mask=mask, **{"temperature": 1.0, **options})  # type: ignore[arg-type]


def by_definition(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    scaled = logits / temperature
    logs = scaled.log_softmax(-1)
    return (
        logs.gather(-1, ids.unsqueeze(-1)).squeeze(-1),
        scaled.logsumexp(-1),
        -(logs.exp() * logs).sum(-1),
    )


def assert_close(found: TokenStatistics, expected: tuple[Tensor, ...], nats: float = 5e-6) -> None:
    for ours, truth in zip(found[:3], expected, strict=True):
        assert ((ours.cpu().double() - truth).abs() <= nats + 2**-23 * truth.abs()).all()


def test_worked_example_of_the_docstring(device: torch.device) -> None:
    logits = torch.tensor([[0.0, math.log(3)]], device=device)
    found = everything(logits, torch.tensor([0], device=device))
    # p = [1/4, 3/4]: entropy 1/4 ln 4 + 3/4 ln(4/3).
    expected = [-math.log(4), math.log(4), math.log(4) - 0.75 * math.log(3)]
    assert [values.item() for values in found[:3]] == pytest.approx(expected, abs=1e-6)
    assert found.rank.tolist() == [2]
    assert found.rank.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_all_equal_float64(device: torch.device, dtype: torch.dtype, temperature: float) -> None:
    logits = normal(4, 3, 5003).to(dtype)
    ids = torch.randint(5003, (4, 3), generator=torch.Generator().manual_seed(1))
    found = everything(logits.to(device), ids.to(device), temperature=temperature)
    assert_close(found, by_definition(logits.double(), ids, temperature))
    chosen = logits.gather(-1, ids.unsqueeze(-1))
    assert torch.equal(found.rank.cpu(), (logits > chosen).sum(-1) + 1)


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_entropy_does_not_cancel_at_large_logits(offset: float) -> None:
    # Whole eighths, exact in float32 beside the offset.
    logits, ids = (normal(8, 500) * 8).round() / 8 + offset, torch.arange(8)
    assert_close(everything(logits, ids), by_definition(logits.double(), ids))


def test_ties_share_the_better_rank_and_masked_positions_are_zero() -> None:
    logits = torch.tensor([[2.0, 5.0, 5.0, 1.0]] * 3)
    found = token_statistics(
        logits, torch.tensor([2, 0, -1]), temperature=1.0, mask=torch.tensor([True, True, False])
    )
    assert found.rank.tolist() == [1, 3, 0]
    assert [values[2].item() for values in found] == [0, 0, 0, 0]


def test_excluded_columns_add_nothing_to_any_of_them(device: torch.device) -> None:
    logits, ids = normal(5, 40), torch.tensor([1, 3, 5, 39, 7])
    logits[:, ::2] = -math.inf
    found = everything(logits.to(device), ids.to(device))
    assert_close(found, by_definition(logits[:, 1::2].double(), ids // 2))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_no_entropy_and_no_normaliser(poison: float) -> None:
    logits = torch.zeros(2, 50)
    logits[1, 17] = poison
    found = everything(logits, torch.tensor([3, 3]))
    for values in found[:3]:
        assert values.isnan().tolist() == [False, True]


def test_gradients_of_all_three_pass_gradcheck() -> None:
    logits, ids = normal(3, 7).double().requires_grad_(), torch.tensor([0, 6, 3])
    for index in range(3):
        assert torch.autograd.gradcheck(
            lambda x, index=index: everything(x, ids, temperature=0.7)[index], (logits,)
        )
    assert not everything(logits, ids).rank.requires_grad


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)])
def test_gradients_of_all_three_equal_float64(
    device: torch.device, dtype: torch.dtype, relative: float
) -> None:
    logits, ids = normal(6, 300).to(dtype), torch.arange(6)
    exact, leaf = logits.double().requires_grad_(), logits.to(device).requires_grad_()
    weights = [normal(6, seed=seed) for seed in (2, 3, 4)]
    found = everything(leaf, ids.to(device), temperature=0.7)
    sum((ours * w.to(device)).sum() for ours, w in zip(found[:3], weights, strict=True)).backward()
    truth = by_definition(exact, ids, 0.7)
    sum((values * w).sum() for values, w in zip(truth, weights, strict=True)).backward()
    assert (leaf.grad.cpu().double() - exact.grad).norm() <= relative * exact.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("excluded", [-math.inf, -3e38])
def test_an_excluded_column_has_no_gradient_of_the_entropy(
    device: torch.device, dtype: torch.dtype, excluded: float
) -> None:
    # Nearly all mass on one id, a small temperature, a gradient above 1: the steepest slope there is.
    kept, ids = torch.tensor([[0.0, 9.0], [3.0, 2.0]], dtype=dtype), torch.tensor([1, 0])
    leaf = torch.cat([kept, torch.full((2, 1), excluded, dtype=dtype)], dim=1).to(device).requires_grad_()
    (2 * everything(leaf, ids.to(device), temperature=0.5).entropy).sum().backward()
    exact = kept.double().requires_grad_()
    (2 * by_definition(exact, ids, 0.5)[2]).sum().backward()
    relative = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(leaf.grad[:, :2].cpu().double(), exact.grad, rtol=relative, atol=1e-9)
    assert leaf.grad[:, 2].tolist() == [0, 0]


@pytest.mark.parametrize("options", [{}, {"soft_cap": 10.0}])
def test_a_gradient_in_place_is_the_same_gradient_over_the_logits(options: dict[str, float]) -> None:
    leaf, ids = normal(6, 33).requires_grad_(), torch.arange(6)
    mask = torch.tensor([True, True, False, True, False, True])
    call = {"temperature": 0.7, "mask": mask, **options}
    expected = torch.autograd.grad(token_logprobs(leaf, ids, **call).sum(), leaf)[0]
    logits = leaf * 1.0
    found = token_logprobs(logits, ids, **call, in_place_backward=True)
    (grad,) = torch.autograd.grad(found.sum(), logits)
    assert torch.equal(grad, expected)
    assert grad.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(found.sum(), logits)


def test_a_gradient_in_place_of_a_leaf_is_refused() -> None:
    with pytest.raises(DtypeError, match=r"logits: found a leaf .* in_place_backward=True"):
        everything(normal(2, 5).requires_grad_(), torch.tensor([0, 1]), in_place_backward=True)
    everything(normal(2, 5), torch.tensor([0, 1]), in_place_backward=True)


@pytest.mark.parametrize(
    "shared",
    [
        lambda leaf: leaf.reshape(-1)[:5].expand(3, 5),
        # Windows of five, each shifted by two.
        lambda leaf: leaf.reshape(-1).as_strided((3, 5), (2, 1)),
    ],
)
def test_a_gradient_in_place_of_logits_that_share_memory_is_refused(shared) -> None:
    logits = shared(normal(2, 5).requires_grad_() * 1.0)
    ids, mask = torch.tensor([0, 1, 2]), torch.ones(3, dtype=torch.bool)
    with pytest.raises(DtypeError, match=r"logits: found shape \[3, 5\] with strides .* a place of its own"):
        token_logprobs(logits, ids, temperature=1.0, mask=mask, in_place_backward=True)
    token_logprobs(logits, ids, temperature=1.0, mask=mask).sum().backward()


def test_whoever_else_has_kept_the_logits_notices_a_gradient_in_place() -> None:
    leaf = normal(2, 5).requires_grad_()
    logits = leaf * 1.0
    other = logits.square().sum()
    found = everything(logits, torch.tensor([0, 1]), in_place_backward=True).logprobs.sum()
    torch.autograd.grad(found, logits)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_logits_in_bfloat16_are_those_that_a_bfloat16_head_rounds() -> None:
    hidden, weight = normal(700, 64).bfloat16(), (normal(300, 64, seed=1) / 24).bfloat16()
    bias, ids, mask = normal(300, seed=2).bfloat16(), torch.arange(700) % 300, torch.arange(700) % 3 != 0
    call = {"temperature": 0.7, "mask": mask}
    for given in (None, bias):
        rounded = torch.nn.functional.linear(hidden, weight, given)
        expected = by_definition(rounded.double(), ids, 0.7)[0]
        found = linear_logprobs(hidden, weight, ids, bias=given, logits_dtype=torch.bfloat16, **call)
        # A sum of 64 terms may be rounded the other way where it is summed in another order.
        near = (found.double() - expected).abs()[mask] <= 5e-6
        assert near.double().mean() > 0.5
        exact = by_definition(
            hidden.double() @ weight.double().T + (0 if given is None else given), ids, 0.7
        )[0]
        error, eager_error = (found - exact).abs()[mask], (expected - exact).abs()[mask]
        assert 1e-3 < error.max() <= 1.2 * eager_error.max()
    from_float = linear_logprobs(hidden.float(), weight.float(), ids, logits_dtype=torch.bfloat16, **call)
    by_hand = by_definition((hidden.float() @ weight.float().T).bfloat16().double(), ids, 0.7)[0]
    assert ((from_float.double() - by_hand).abs()[mask] <= 5e-6).double().mean() > 0.9


def test_only_logit_dtypes_that_are_known_are_taken() -> None:
    hidden, ids, mask = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    with pytest.raises(
        DtypeError, match=r"logits_dtype: found torch.float16 .* expected None, torch.float32"
    ):
        linear_logprobs(hidden, hidden, ids, temperature=1.0, mask=mask, logits_dtype=torch.float16)
    doubles = hidden.double()
    with pytest.raises(DtypeError, match=r"logits_dtype: found torch.float32 for torch.float64 logits"):
        linear_logprobs(doubles, doubles, ids, temperature=1.0, mask=mask, logits_dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounded", [None, torch.bfloat16])
def test_a_token_of_linear_logprobs_alone_has_the_same_bits_as_in_its_batch(
    dtype: torch.dtype, rounded: torch.dtype | None
) -> None:
    hidden, weight = normal(700, 96).to(dtype), (normal(900, 96, seed=1) / 30).to(dtype)
    ids = torch.arange(700)
    call = {"temperature": 0.7, "logits_dtype": rounded}
    together = linear_logprobs(hidden, weight, ids, mask=torch.ones(700, dtype=torch.bool), **call)
    # One token; a few; a tile and one; and with others left out in between.
    for some in (slice(3, 4), slice(5, 38), slice(100, 613), slice(0, 700, 3)):
        count = len(range(700)[some])
        alone = linear_logprobs(
            hidden[some], weight, ids[some], mask=torch.ones(count, dtype=torch.bool), **call
        )
        assert torch.equal(alone, together[some])
