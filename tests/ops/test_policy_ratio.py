"""`policy_ratio`: worked numbers, k3 against exact decimals, gradients, and what lies under the mask."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlbatch_kernels import PolicyRatio, policy_ratio


def ratio_of(log_ratio: Tensor) -> PolicyRatio:
    """Every token trained, and an inference logprob of 0, so that log_ratio is exactly what is given."""
    return policy_ratio(log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio, dtype=torch.bool))


def exact_k3(log_ratio: float) -> Decimal:
    with localcontext() as context:
        context.prec = 60
        value = Decimal(log_ratio)
        return value.exp() - 1 - value


def exact_slope(log_ratio: float) -> Decimal:
    with localcontext() as context:
        context.prec = 60
        return Decimal(log_ratio).exp() - 1


def log_ratios() -> list[float]:
    """float32 values of both signs from 1e-6 to 10, and round the ends of the series."""
    ladder = torch.logspace(-6, 1, 400, dtype=torch.float64).float()
    edges = torch.tensor([0.5 - 2**-25, 0.5, 0.5 + 2**-24])
    positive = torch.cat([ladder, edges])
    return torch.cat([positive, -positive]).tolist()


def test_worked_example_of_the_docstring(device: torch.device) -> None:
    trainer = torch.tensor([[-1.0, -1.0]], device=device)
    inference = torch.tensor([[-1.5, math.nan]], device=device)
    found = policy_ratio(trainer, inference, torch.tensor([[True, False]], device=device))
    assert found.log_ratio.tolist() == [[0.5, 0.0]]
    # e^0.5 = 1.648721; minus 1 minus 0.5 = 0.148721.
    assert found.ratio.tolist() == [[pytest.approx(1.648721, abs=1e-6), 1.0]]
    assert found.inference_kld.tolist() == [[pytest.approx(0.148721, abs=1e-6), 0.0]]


def test_kld_is_right_to_a_millionth_and_never_negative(device: torch.device) -> None:
    values = log_ratios()
    found = ratio_of(torch.tensor(values, device=device)).inference_kld.tolist()
    for value, kld in zip(values, found, strict=True):
        truth = exact_k3(value)
        assert kld >= 0
        assert abs(Decimal(kld) - truth) <= Decimal("1e-6") * truth, value


def test_gradient_of_kld_is_ratio_minus_one_to_a_millionth(device: torch.device) -> None:
    values = log_ratios()
    trainer = torch.tensor(values, device=device, requires_grad=True)
    ratio_of(trainer).inference_kld.sum().backward()
    for value, slope in zip(values, trainer.grad.tolist(), strict=True):
        truth = exact_slope(value)
        assert abs(Decimal(slope) - truth) <= Decimal("1e-6") * abs(truth), value


@pytest.mark.parametrize("value", [0.0, 1e-30, -1e-30, 1e-20])
def test_kld_of_next_to_nothing_is_zero_or_more(value: float) -> None:
    assert 0 <= ratio_of(torch.tensor([value])).inference_kld.item() <= 1e-38


def test_the_ratio_is_clamped_inside_exp_only(device: torch.device) -> None:
    trainer = torch.tensor([-50.0, 50.0, -20.0, 20.0], device=device, requires_grad=True)
    found = ratio_of(trainer)
    assert found.log_ratio.tolist() == [-50.0, 50.0, -20.0, 20.0]
    big, small = math.exp(20), math.exp(-20)
    assert found.ratio.tolist() == pytest.approx([small, big, small, big], rel=1e-6)
    # exp(-20) - 1 + 50 = 49; at -20: 19.
    assert found.inference_kld.tolist() == pytest.approx([49.0, big - 51, 19.0, big - 21], rel=1e-6)
    found.inference_kld.sum().backward()
    # Far above, the gradient still pulls the trainer back; a clamp's own would push it on by -1.
    assert trainer.grad.tolist() == pytest.approx([-1.0, big, -1.0, big], rel=1e-6)


def test_gradients_pass_gradcheck(device: torch.device) -> None:
    trainer = torch.tensor([[-3.0, -0.1, -0.9], [-1.2, -7.0, -0.5]], dtype=torch.float64, device=device)
    inference = torch.tensor([[-1.0, -0.1, -0.5], [-1.5, -6.7, math.nan]], device=device)
    mask = torch.tensor([[True, True, True], [True, True, False]], device=device)
    assert torch.autograd.gradcheck(
        lambda x: tuple(policy_ratio(x, inference, mask)), (trainer.requires_grad_(),)
    )


def test_gradient_reaches_the_trainer_only(device: torch.device) -> None:
    trainer = torch.tensor([-1.0], device=device, requires_grad=True)
    inference = torch.tensor([-1.5], device=device, requires_grad=True)
    found = policy_ratio(trainer, inference, torch.tensor([True], device=device))
    (found.log_ratio + found.ratio + found.inference_kld).sum().backward()
    # 1 + e^0.5 + (e^0.5 - 1)
    assert trainer.grad.item() == pytest.approx(2 * math.exp(0.5), rel=1e-6)
    assert inference.grad is None


# (trainer, inference) -> (log_ratio, ratio, inference_kld), by arithmetic with infinities.
@pytest.mark.parametrize(
    ("trainer", "inference", "expected"),
    [
        (-math.inf, -1.0, (-math.inf, 0.0, math.inf)),
        (-1.0, -math.inf, (math.inf, math.inf, math.nan)),
        (math.nan, -1.0, (math.nan,) * 3),
        (-1.0, math.nan, (math.nan,) * 3),
    ],
)
def test_what_is_not_finite_at_a_trained_token_shows(
    trainer: float, inference: float, expected: tuple[float, ...]
) -> None:
    found = policy_ratio(torch.tensor([trainer]), torch.tensor([inference]), torch.tensor([True]))
    assert [value.item() for value in found] == pytest.approx(list(expected), nan_ok=True)


def test_float64_of_either_argument_makes_float64() -> None:
    single, double, mask = (
        torch.zeros(2),
        torch.zeros(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.bool),
    )
    assert {value.dtype for value in policy_ratio(single, single, mask)} == {torch.float32}
    assert {value.dtype for value in policy_ratio(single, double, mask)} == {torch.float64}
    assert {value.dtype for value in policy_ratio(double, single, mask)} == {torch.float64}


def test_an_empty_batch_gives_an_empty_result() -> None:
    found = policy_ratio(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool))
    assert [value.shape for value in found] == [(2, 0)] * 3


@given(
    tokens=st.lists(
        st.tuples(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32), st.booleans()), min_size=1
    ),
    garbage=st.floats(width=32),
)
def test_values_under_the_mask_change_no_bit(tokens: list[tuple[float, float, bool]], garbage: float) -> None:
    mask = torch.tensor([token[2] for token in tokens])
    results = []
    for filler in (0.0, garbage):
        trainer, inference = (torch.tensor([token[side] for token in tokens]) for side in (0, 1))
        trainer[~mask], inference[~mask] = filler, filler
        trainer.requires_grad_()
        found = policy_ratio(trainer, inference, mask)
        torch.stack(tuple(found)).sum().backward()
        results.append((*(value.detach() for value in found), trainer.grad))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)
    assert not results[0][3][~mask].any()
