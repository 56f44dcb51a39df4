"""Soft cap and vocabulary mask in every op and backend, against float64 written here."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlbatch_kernels import (
    DtypeError,
    KeptIds,
    ShapeError,
    TokenRangeError,
    TokenStatistics,
    Truncation,
    head,
    linear_logprobs,
    token_logprobs,
    token_statistics,
)

pytestmark = pytest.mark.usefixtures("backend")

ULP = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""Relative error of gradients: of float32 sums, or one rounding to the dtype."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def everything(logits: Tensor, ids: Tensor, **options: Any) -> TokenStatistics:
    mask = torch.ones(ids.shape, dtype=torch.bool, device=ids.device)
    return token_statistics(logits, ids, mask=mask, **{"temperature": 0.7, **options})


def by_definition(logits: Tensor, ids: Tensor, soft_cap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob, log-sum-exp and entropy at temperature 0.7."""
    scaled = (logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)) / 0.7
    logs = scaled.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return logs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), scaled.logsumexp(-1), entropy


# 1 and 17: less than a vector, and one more than one; 1003 and 4099: ragged last vectors and blocks.
@pytest.mark.parametrize("vocab_size", [1, 17, 1003, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("soft_cap", [None, 20.0])
@pytest.mark.parametrize("masked", [False, True])
def test_statistics_and_gradients_of_shaped_logits_equal_float64(
    device: torch.device, vocab_size: int, dtype: torch.dtype, soft_cap: float | None, masked: bool
) -> None:
    # Standard deviation 9: the cap bends nearly all of them.
    logits, ids = (
        (normal(5, vocab_size) * 3).to(dtype),
        torch.tensor([0, vocab_size - 1, 0, 0, vocab_size - 1]),
    )
    vocab_mask = torch.arange(vocab_size) % 3 != 1
    vocab_mask[-1] = True
    leaf = logits.clone().to(device).requires_grad_()
    options = {"vocab_mask": vocab_mask.to(device)} if masked else {}
    found = everything(leaf, ids.to(device), soft_cap=soft_cap, **options)
    # The truth knows no mask: it has only the columns that count.
    counts = vocab_mask if masked else torch.ones_like(vocab_mask)
    exact, ids = logits.double()[:, counts].requires_grad_(), (counts.cumsum(0) - 1)[ids]
    expected = by_definition(exact, ids, soft_cap)
    for ours, truth in zip(found[:3], expected, strict=True):
        assert ((ours.cpu().double() - truth).abs() <= 5e-6 + 2**-23 * truth.abs()).all()
    assert torch.equal(found.rank.cpu(), (exact > exact.gather(-1, ids.unsqueeze(-1))).sum(-1) + 1)
    weights = [normal(5, seed=seed) for seed in (3, 4, 5)]
    sum((ours * w.to(device)).sum() for ours, w in zip(found[:3], weights, strict=True)).backward()
    sum((truth * w).sum() for truth, w in zip(expected, weights, strict=True)).backward()
    grad = leaf.grad.cpu().double()
    assert not grad[:, ~counts].any()
    assert (grad[:, counts] - exact.grad).norm() <= ULP[dtype] * exact.grad.norm()


def test_a_saturated_cap_keeps_the_digits_of_its_gradient(device: torch.device) -> None:
    # At 75 the cap of 15 has bent a logit by all but 4e-5 of it: 1 - tanh(5)^2 = 1.8e-4.
    logits, ids = torch.tensor([[75.0, 70.0, -75.0]]), torch.tensor([1])
    exact, leaf = logits.double().requires_grad_(), logits.to(device).requires_grad_()
    everything(leaf, ids.to(device), soft_cap=15.0).logprobs.sum().backward()
    by_definition(exact, ids, 15.0)[0].sum().backward()
    torch.testing.assert_close(leaf.grad.cpu().double(), exact.grad, rtol=2e-6, atol=1e-20)


def test_a_capped_target_that_is_nearly_certain_has_no_positive_logprob() -> None:
    # The target is the largest of its row, and all others are excluded by their size.
    logits = torch.full((2000, 33), -1e4)
    logits[:, 7] = torch.linspace(1, 2000, 2000)
    found = everything(logits, torch.full((2000,), 7), soft_cap=37.0)
    assert (found.logprobs <= 0).all()
    assert (found.rank == 1).all()


@pytest.mark.parametrize(("logit", "expected"), [(math.inf, 5.0), (-math.inf, -5.0), (1e4, 5.0)])
def test_a_cap_bounds_what_is_infinite_or_huge_and_leaves_nan(
    device: torch.device, logit: float, expected: float
) -> None:
    logits = torch.tensor([[0.0, logit], [0.0, math.nan]], device=device)
    found = everything(logits, torch.tensor([1, 0], device=device), soft_cap=5.0, temperature=1.0)
    assert found.logprobs[0].item() == pytest.approx(-math.log1p(math.exp(-expected)), abs=1e-6)
    assert found.logprobs[1].isnan()


@pytest.mark.parametrize("soft_cap", [None, 20.0])
@pytest.mark.parametrize("padding", [math.nan, math.inf, 1e4])
def test_what_lies_in_excluded_columns_reaches_neither_result_nor_gradient(
    device: torch.device, soft_cap: float | None, padding: float
) -> None:
    logits, ids = normal(4, 60).to(device), torch.tensor([0, 36, 7, 31], device=device)
    leaf = torch.nn.functional.pad(logits, (0, 4), value=padding).requires_grad_()
    other = logits.clone().requires_grad_()
    # The number of ids, as a head that was padded to an even size has it.
    found = everything(leaf, ids, vocab_mask=60, soft_cap=soft_cap)
    expected = everything(other, ids, soft_cap=soft_cap)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
    (found.logprobs + found.entropy).sum().backward()
    (expected.logprobs + expected.entropy).sum().backward()
    torch.testing.assert_close(leaf.grad[:, :60], other.grad, rtol=1e-5, atol=1e-6)
    assert leaf.grad[:, 60:].tolist() == [[0] * 4] * 4


def test_shaped_gradients_pass_gradcheck(device: torch.device) -> None:
    logits, ids = normal(4, 9).double().to(device).requires_grad_(), torch.tensor([0, 8, 4, 3], device=device)
    vocab_mask = torch.tensor([True] * 5 + [False] * 3 + [True], device=device)

    def op(logits: Tensor) -> tuple[Tensor, ...]:
        return tuple(everything(logits, ids, soft_cap=4.0, vocab_mask=vocab_mask)[:3])

    assert torch.autograd.gradcheck(op, (logits,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shaped_row_alone_has_the_same_bits_as_in_its_batch(dtype: torch.dtype) -> None:
    logits, ids = normal(7, 2059).to(dtype).requires_grad_(), torch.arange(7)
    together = everything(logits, ids, soft_cap=6.0, vocab_mask=2050)
    (grad,) = torch.autograd.grad((together.logprobs + together.entropy).sum(), logits)
    for row in (0, 5):
        leaf = logits[row : row + 1].detach().clone().requires_grad_()
        alone = everything(leaf, ids[row : row + 1], soft_cap=6.0, vocab_mask=2050)
        assert all(torch.equal(one[0], every[row]) for one, every in zip(alone, together, strict=True))
        (alone.logprobs + alone.entropy).sum().backward()
        assert torch.equal(leaf.grad[0], grad[row])


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "TOKEN_TILE", 5)
    monkeypatch.setattr(head, "TALL_TILES", 1)
    monkeypatch.setattr(head, "VOCAB_TILE", 16)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("soft_cap", [None, 6.0])
def test_a_head_whose_last_rows_are_padding_is_as_one_without_them(
    device: torch.device, dtype: torch.dtype, soft_cap: float | None
) -> None:
    hidden, weight = normal(12, 24).to(dtype), (normal(70, 24, seed=1) / 5).to(dtype)
    # Three padding rows in a tile with others, and a tile of nothing else.
    weight[45:] = 1e4
    ids = torch.arange(12) * 4
    exact = [hidden.double().requires_grad_(), weight[:45].double().requires_grad_()]
    leaves = [hidden.to(device).requires_grad_(), weight.to(device).requires_grad_()]
    mask = torch.arange(12) != 3
    found = linear_logprobs(
        *leaves,
        ids.to(device),
        temperature=0.7,
        mask=mask.to(device),
        logit_scale=0.5,
        soft_cap=soft_cap,
        vocab_mask=45,
    )
    expected = by_definition(exact[0] @ exact[1].T * 0.5, ids, soft_cap)[0][mask]
    assert ((found.cpu()[mask].double() - expected).abs() <= 5e-6 + 2**-23 * expected.abs()).all()
    found.sum().backward()
    expected.sum().backward()
    relative = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
    grad = leaves[1].grad.cpu().double()
    assert not grad[45:].any()
    assert (grad[:45] - exact[1].grad).norm() <= relative * exact[1].grad.norm()
    assert (leaves[0].grad.cpu().double() - exact[0].grad).norm() <= relative * exact[0].grad.norm()


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize(
    "kept", [Truncation(top_k=3), Truncation(top_p=0.7), KeptIds(ids=torch.arange(48).reshape(6, 8))]
)
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_kept_sets_are_found_in_logits_that_are_shaped(kept: Any, soft_cap: float | None) -> None:
    hidden, weight, vocab_mask = normal(6, 8), normal(48, 8, seed=1) / 3, torch.arange(48) % 5 != 2
    product = (hidden @ weight.T).requires_grad_()
    # The most probable id is in every set of a rule; of a list, its last member that counts.
    listed = torch.where(vocab_mask, torch.arange(48), -1).reshape(6, 8).amax(-1)
    ids = listed if isinstance(kept, KeptIds) else torch.where(vocab_mask, product, -math.inf).argmax(-1)
    common: dict[str, Any] = {"temperature": 0.7, "mask": torch.ones(6, dtype=torch.bool), "kept": kept}
    found = linear_logprobs(hidden, weight, ids, vocab_mask=vocab_mask, soft_cap=soft_cap, **common)
    again = token_logprobs(product, ids, vocab_mask=vocab_mask, soft_cap=soft_cap, **common)
    capped = product if soft_cap is None else soft_cap * torch.tanh(product / soft_cap)
    by_hand = torch.where(vocab_mask, capped, -math.inf).detach().requires_grad_()
    expected = token_logprobs(by_hand, ids, **common)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    torch.testing.assert_close(again, expected, rtol=0, atol=5e-6)
    (grad,) = torch.autograd.grad(again.sum(), product)
    expected.sum().backward()
    slope = 1 if soft_cap is None else 1 - torch.tanh(product / soft_cap) ** 2
    torch.testing.assert_close(grad, by_hand.grad * slope, rtol=1e-5, atol=1e-6)
    assert not grad[:, ~vocab_mask].any()


def test_logits_in_bfloat16_are_rounded_after_each_step_as_a_model_does() -> None:
    hidden, weight = normal(8, 32).bfloat16(), (normal(40, 32, seed=1) / 6).bfloat16()
    ids = torch.arange(8)
    mask = torch.ones(8, dtype=torch.bool)
    found = linear_logprobs(
        hidden, weight, ids, temperature=1.0, mask=mask, soft_cap=5.0, logits_dtype=torch.bfloat16
    )
    # Gemma 2's forward, in the dtype of its head.
    logits = torch.tanh(hidden @ weight.T / 5.0) * 5.0
    expected = logits.float().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    exact = by_definition(hidden.double() @ weight.double().T, ids, 5.0)[0]
    assert (found - exact).abs().max() > 1e-3


def test_a_trained_target_that_the_mask_excludes_is_named(device: torch.device) -> None:
    ids, mask = torch.tensor([0, 3, 4, 3]), torch.tensor([True, True, True, False])
    vocab_mask = torch.tensor([True, True, True, False, True], device=device)
    text = r"target_ids: found id 3 at \(1,\), which vocab_mask excludes; expected an id that it counts"
    common: Any = {"temperature": 1.0, "mask": mask.to(device), "vocab_mask": vocab_mask}
    hidden, weight = normal(4, 2).to(device), normal(5, 2).to(device)
    with pytest.raises(TokenRangeError, match=text):
        token_logprobs(hidden @ weight.T, ids.to(device), **common)
    with pytest.raises(TokenRangeError, match=text):
        linear_logprobs(hidden, weight, ids.to(device), **common)
    # Where it is not trained it may be anything.
    ids[1] = 1
    assert token_logprobs(hidden @ weight.T, ids.to(device), **common).isfinite().all()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (torch.ones(4, dtype=torch.bool), ShapeError, r"found shape \[4\], expected \[5\]"),
        (torch.ones(5), DtypeError, "found torch.float32, expected one of bool"),
        (True, DtypeError, "found bool, expected a torch.Tensor"),
        (0, ShapeError, r"found 0 ids, expected from 1 to 5 \(V\)"),
        (6, ShapeError, r"found 6 ids, expected from 1 to 5 \(V\)"),
    ],
)
def test_a_vocabulary_mask_must_fit(wrong: Any, error: type[Exception], text: str) -> None:
    ids, mask = torch.tensor([0, 1]), torch.tensor([True, True])
    with pytest.raises(error, match=f"vocab_mask: {text}"):
        everything(normal(2, 5), ids, vocab_mask=wrong)
    with pytest.raises(error, match=f"vocab_mask: {text}"):
        linear_logprobs(normal(2, 3), normal(5, 3), ids, temperature=1.0, mask=mask, vocab_mask=wrong)
