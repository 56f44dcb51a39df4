"""`token_logprobs` against float64 written here, its gradients, its extremes and its memory."""

import math

import peak_memory
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlbatch_kernels import TokenRangeError, softmax, token_logprobs

pytestmark = pytest.mark.usefixtures("backend")

HALVES = (torch.float16, torch.bfloat16)


def truth(logits: Tensor, target_ids: Tensor, temperature: float | Tensor) -> Tensor:
    """The definition, in float64, nothing masked."""
    divisor = temperature.double().unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    scaled = logits.double() / divisor
    chosen = scaled.gather(-1, target_ids.long().unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def tolerance(expected: Tensor) -> Tensor:
    """5e-6 nats + 1 ulp of the float32 result."""
    rounded = expected.float()
    return 5e-6 + (torch.nextafter(rounded, torch.tensor(-math.inf)) - rounded).abs().double()


def assert_exact(found: Tensor, expected: Tensor) -> None:
    found, expected = found.detach().cpu(), expected.detach().cpu()
    assert found.dtype == torch.float32
    assert torch.isfinite(found).all()
    assert ((found.double() - expected).abs() <= tolerance(expected)).all()


def normal(*shape: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def ids_below(vocab_size: int, *shape: int) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1))


def test_worked_example_of_the_docstring(device: torch.device) -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]] * 2, device=device)
    temperature = torch.tensor([1.0, 0.5], device=device)
    found = token_logprobs(
        logits,
        torch.tensor([1, 1], device=device),
        temperature=temperature,
        mask=torch.tensor([True, True], device=device),
    )
    # softmax [1/4, 3/4]; at temperature 0.5 the odds are squared: [1/10, 9/10].
    assert found.tolist() == pytest.approx([math.log(0.75), math.log(0.9)], abs=1e-6)


# 1: nothing to normalise; 15 and 17: no multiple of a vector; 4097: one over a power of two;
# 151936: a real vocabulary.
@pytest.mark.parametrize("vocab_size", [1, 2, 15, 17, 1003, 4097, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_equals_float64_of_the_same_logits(device: torch.device, vocab_size: int, dtype: torch.dtype) -> None:
    logits, ids = normal(2, 3, vocab_size).to(dtype), ids_below(vocab_size, 2, 3)
    ids[0, 0], ids[0, 1] = 0, vocab_size - 1
    found = token_logprobs(
        logits.to(device), ids.to(device), temperature=0.7, mask=torch.ones(2, 3, dtype=torch.bool).to(device)
    )
    assert_exact(found, truth(logits, ids, 0.7))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-2, 30.0])
def test_logits_of_ten_thousand_lose_nothing(device: torch.device, temperature: float) -> None:
    generator = torch.Generator().manual_seed(2)
    spread = (torch.rand(64, 1000, generator=generator) * 2 - 1) * 1e4
    offset = normal(64, 1000) + 1e4
    ids, mask = ids_below(1000, 64), torch.ones(64, dtype=torch.bool)
    ids[::2] = spread.argmax(-1)[::2]
    for logits in (spread, offset, -offset):
        found = token_logprobs(
            logits.to(device), ids.to(device), temperature=temperature, mask=mask.to(device)
        )
        assert_exact(found, truth(logits, ids, temperature))


def test_equal_logits_give_one_over_v_and_a_peak_gives_nothing_lost(device: torch.device) -> None:
    logits = torch.zeros(2, 50000, device=device)
    logits[1, 7] = 1e4
    mask = torch.ones(2, dtype=torch.bool, device=device)
    found = token_logprobs(logits, torch.tensor([3, 7], device=device), temperature=1.0, mask=mask)
    assert found.tolist() == [pytest.approx(-math.log(50000), abs=1e-6), 0.0]


def test_columns_of_minus_infinity_are_excluded(device: torch.device) -> None:
    logits = normal(5, 100)
    logits[:, ::2] = -math.inf
    ids = torch.tensor([1, 3, 51, 99, 7])
    mask = torch.ones(5, dtype=torch.bool)
    leaf = logits.to(device).requires_grad_()
    found = token_logprobs(leaf, ids.to(device), temperature=1.0, mask=mask.to(device))
    assert_exact(found, truth(logits[:, 1::2], ids // 2, 1.0))
    found.sum().backward()
    assert torch.equal(leaf.grad[:, ::2].cpu(), torch.zeros(5, 50))


def test_a_target_of_minus_infinity_is_minus_infinity(device: torch.device) -> None:
    logits = torch.tensor([[0.0, -math.inf]], device=device)
    mask = torch.tensor([True], device=device)
    found = token_logprobs(logits, torch.tensor([1], device=device), temperature=1.0, mask=mask)
    assert found.tolist() == [-math.inf]


# Where the target itself is fine too: the normaliser is not.
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("target", [0, 1])
def test_nan_and_infinite_logits_give_nan_in_their_row_only(
    device: torch.device, poison: float, target: int
) -> None:
    logits = torch.zeros(3, 4, device=device)
    logits[1, 0] = poison
    ids, mask = torch.full((3,), target, device=device), torch.ones(3, dtype=torch.bool, device=device)
    found = token_logprobs(logits, ids, temperature=1.0, mask=mask).tolist()
    assert math.isnan(found[1])
    assert [found[0], found[2]] == pytest.approx([-math.log(4)] * 2)


def test_a_row_of_minus_infinity_gives_nan(device: torch.device) -> None:
    logits = torch.full((1, 8), -math.inf, device=device, requires_grad=True)
    ids, mask = torch.tensor([3], device=device), torch.tensor([True], device=device)
    found = token_logprobs(logits, ids, temperature=1.0, mask=mask)
    assert found.isnan().all()
    found.sum().backward()
    assert logits.grad.isnan().all()


def test_no_tokens_and_nothing_trained_still_reach_backward(device: torch.device) -> None:
    for shape in ((0,), (2, 0), (2, 3)):
        logits = torch.full((*shape, 5), math.nan, device=device, requires_grad=True)
        ids = torch.full(shape, -100, device=device)
        mask = torch.zeros(shape, dtype=torch.bool, device=device)
        found = token_logprobs(logits, ids, temperature=1.0, mask=mask)
        assert torch.equal(found, torch.zeros(shape, device=device))
        found.sum().backward()
        assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_a_single_position_needs_no_leading_axis() -> None:
    found = token_logprobs(torch.zeros(4), torch.tensor(2), temperature=1.0, mask=torch.tensor(True))
    assert found.shape == ()
    assert found.item() == pytest.approx(-math.log(4))


def test_slices_of_a_larger_tensor_are_taken_as_they_lie(device: torch.device) -> None:
    whole = normal(2, 6, 11).to(device).requires_grad_()
    ids, mask = (
        ids_below(11, 2, 5).to(device),
        torch.tensor([[True, False, True, True, False]] * 2).to(device),
    )
    found = token_logprobs(whole[:, 1:], ids, temperature=1.0, mask=mask)
    expected = truth(whole[:, 1:], ids, 1.0)
    assert_exact(found[mask], expected[mask])
    assert not found[~mask].any()
    found.sum().backward()
    (from_truth,) = torch.autograd.grad(expected[mask].sum(), whole)
    torch.testing.assert_close(whole.grad, from_truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("masked_id", [-100, -1, 5, 10**12])
def test_what_lies_under_the_mask_reaches_neither_result_nor_gradient(
    device: torch.device, masked_id: int
) -> None:
    mask = torch.tensor([True, False, True, False], device=device)
    results = []
    for filler, number in ((0.0, 0), (math.nan, masked_id), (math.inf, masked_id)):
        logits = normal(4, 5).to(device)
        logits[~mask] = filler
        ids, temperature = torch.tensor([1, 0, 4, 0], device=device), torch.ones(4, device=device)
        ids[~mask], temperature[~mask] = number, filler
        leaf = logits.requires_grad_()
        found = token_logprobs(leaf, ids, temperature=temperature, mask=mask)
        # A NaN that comes back from a loss at masked positions stays there too.
        found.backward(torch.where(mask, torch.tensor(1.0, device=device), math.nan))
        results.append((found.detach(), leaf.grad))
    for found, grad in results:
        assert torch.equal(found, results[0][0])
        assert torch.equal(grad, results[0][1])
    assert not results[0][0][~mask].any()
    assert not results[0][1][~mask].any()
    assert results[0][1][mask].all()


def test_trained_ids_outside_the_vocabulary_are_named_first_ones_first(device: torch.device) -> None:
    ids = torch.tensor([[0, 5, -1], [4, 10**12, 4]], device=device)
    mask = torch.ones(2, 3, dtype=torch.bool, device=device)
    with pytest.raises(TokenRangeError) as raised:
        token_logprobs(torch.zeros(2, 3, 5, device=device), ids, temperature=1.0, mask=mask)
    text = str(raised.value)
    assert "id 5 at (0, 1), id -1 at (0, 2), id 1000000000000 at (1, 1)" in text
    assert "0 <= id < 5" in text


def test_many_offenders_are_counted() -> None:
    with pytest.raises(TokenRangeError, match=r"id 9 at \(4,\) and 95 more"):
        token_logprobs(
            torch.zeros(100, 5),
            torch.full((100,), 9),
            temperature=1.0,
            mask=torch.ones(100, dtype=torch.bool),
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_any_integer_dtype_holds_ids(dtype: torch.dtype) -> None:
    logits, mask = normal(3, 9), torch.ones(3, dtype=torch.bool)
    ids = torch.tensor([0, 8, 4], dtype=dtype)
    assert_exact(token_logprobs(logits, ids, temperature=1.0, mask=mask), truth(logits, ids, 1.0))


def test_gradients_pass_gradcheck(device: torch.device) -> None:
    logits = normal(2, 4, 7).double().to(device).requires_grad_()
    ids, mask = ids_below(7, 2, 4).to(device), torch.tensor([[True, True, False, True]] * 2).to(device)
    temperature = (normal(2, 4, scale=0.3, seed=5).abs() + 0.5).to(device)
    for given_temperature in (0.7, temperature):
        assert torch.autograd.gradcheck(
            lambda x, t=given_temperature: token_logprobs(x, ids, temperature=t, mask=mask), (logits,)
        )


def test_float64_logits_stay_float64() -> None:
    logits, ids = normal(3, 50).double(), ids_below(50, 3)
    found = token_logprobs(logits, ids, temperature=0.7, mask=torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(found, truth(logits, ids, 0.7), rtol=1e-14, atol=1e-14)


# One rounding of the result for half precision, whose unit is 2^-8 (bfloat16) and 2^-11 (float16).
@pytest.mark.parametrize(
    ("dtype", "relative"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)]
)
def test_gradients_equal_those_of_float64(
    device: torch.device, dtype: torch.dtype, relative: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three blocks of rows, the last one ragged.
    monkeypatch.setattr(softmax, "TILE_ELEMENTS", 300 * 5)
    logits, ids, weights = normal(12, 300).to(dtype), ids_below(300, 12), normal(12, seed=3)
    exact, leaf = logits.double().requires_grad_(), logits.to(device).requires_grad_()
    mask = torch.ones(12, dtype=torch.bool, device=device)
    found = token_logprobs(leaf, ids.to(device), temperature=0.7, mask=mask)
    (found * weights.to(device)).sum().backward()
    (truth(exact, ids, 0.7) * weights).sum().backward()
    assert leaf.grad.dtype == dtype
    difference = (leaf.grad.cpu().double() - exact.grad).norm()
    assert difference <= relative * exact.grad.norm()


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids, mask = normal(9, 64), ids_below(64, 9), torch.ones(9, dtype=torch.bool)
    whole = token_logprobs(logits, ids, temperature=0.7, mask=mask)
    # 1: a row is wider than a tile, and is taken all the same.
    for elements in (1, 64 * 2, 64 * 4):
        monkeypatch.setattr(softmax, "TILE_ELEMENTS", elements)
        torch.testing.assert_close(
            token_logprobs(logits, ids, temperature=0.7, mask=mask), whole, rtol=0, atol=1e-6
        )


def test_double_backward_is_refused() -> None:
    logits = normal(2, 5).requires_grad_()
    mask = torch.ones(2, dtype=torch.bool)
    found = token_logprobs(logits, torch.tensor([1, 2]), temperature=1.0, mask=mask)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(found.sum(), logits, create_graph=True)


@given(shift=st.integers(-1000, 1000), seed=st.integers(0, 2**31), temperature=st.floats(0.1, 5.0))
def test_a_constant_added_to_all_logits_changes_nothing(shift: int, seed: int, temperature: float) -> None:
    # Whole eighths, so that the sum with the shift is exact in float32.
    logits = (normal(3, 40, seed=seed) * 8).round() / 8
    ids, mask = ids_below(40, 3), torch.ones(3, dtype=torch.bool)
    plain = token_logprobs(logits, ids, temperature=temperature, mask=mask)
    shifted = token_logprobs(logits + shift, ids, temperature=temperature, mask=mask)
    assert torch.equal(plain, shifted)


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=12),
    garbage=st.floats(width=32),
    masked_id=st.integers(-(2**63), 2**63 - 1),
)
def test_masked_positions_are_as_if_they_were_not_there(
    mask: list[bool], garbage: float, masked_id: int
) -> None:
    kept, size = torch.tensor(mask), len(mask)
    logits, ids, temperature = normal(size, 17), ids_below(17, size), torch.rand(size) + 0.5
    alone = token_logprobs(
        logits[kept], ids[kept], temperature=temperature[kept], mask=torch.ones(sum(mask), dtype=torch.bool)
    )
    logits[~kept], ids[~kept], temperature[~kept] = garbage, masked_id, garbage
    among = token_logprobs(logits, ids, temperature=temperature, mask=kept)
    assert torch.equal(among[~kept], torch.zeros(size - sum(mask)))
    torch.testing.assert_close(among[kept], alone, rtol=0, atol=1e-6)


@pytest.mark.skipif(not peak_memory.IS_KNOWN, reason="peak memory is read from /proc")
def test_forward_and_backward_need_little_beyond_the_gradient(backend: str) -> None:
    setup = """
T, V = 1024, 50_000
logits = torch.zeros(T, V, dtype=torch.bfloat16).requires_grad_()
ids, mask = torch.arange(T), torch.ones(T, dtype=torch.bool)
call = dict(temperature=0.7, backend=backend)
token_logprobs(logits[:8], ids[:8], mask=mask[:8], **call).sum().backward()
logits.grad = None
"""
    peak = peak_memory.peak_mib(
        setup, "token_logprobs(logits, ids, mask=mask, **call).sum().backward()", backend
    )
    # bfloat16 logits and their gradient are 98 MiB each; the float32 of all of them would be 195 more.
    # 37 MiB beyond the gradient were seen; the rest is room for a system that takes pages back meanwhile.
    assert peak < 98 + 150
