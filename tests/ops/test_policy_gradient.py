"""The gradient that comes with the table, against autograd of the losses as one would write them in torch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlbatch_kernels import (
    DtypeError,
    PolicyLoss,
    ScaleError,
    ShapeError,
    alignment_stats,
    alignment_stats_and_policy_gradient,
)

pytestmark = pytest.mark.usefixtures("backend")

CLIP = PolicyLoss(kind="clip", low=0.8, high=1.28)
LOSSES = [
    CLIP,
    PolicyLoss(kind="clip", low=0.0, high=math.inf),
    PolicyLoss(kind="cap", low=0.0, high=2.0),
    PolicyLoss(kind="cap", low=0.5, high=5.0),
]


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def eager(loss: PolicyLoss, trainer: Tensor, inference: Tensor, advantages: Tensor) -> Tensor:
    """The loss of each token; the ratio's exponent is clamped to +-20, as everywhere."""
    ratio = (trainer - inference).clamp(-20, 20).exp()
    if loss.kind == "clip":
        return -torch.minimum(ratio * advantages, ratio.clamp(loss.low, loss.high) * advantages)
    return -ratio.clamp(loss.low, loss.high).detach() * advantages * trainer


def a_batch(width: int = 3000) -> dict[str, Tensor]:
    """Log ratios of every size, beyond +-20 too; one row is untrained here and there, with NaN there."""
    inference, advantages = -normal(4, width, scale=3).abs(), normal(4, width, seed=1)
    # Rows of little noise, of much, and of far outliers: the paths of a kernel.
    noise = normal(4, width, seed=2) * torch.tensor([[0.05], [0.4], [9.0], [0.4]])
    trainer, mask = inference + noise, torch.ones(4, width, dtype=torch.bool)
    mask[3] = torch.arange(width) % 7 != 0
    for values in (inference, trainer, advantages):
        values[~mask] = math.nan
    segments = torch.tensor([(row, 5 * row, width - 3 * row, 0) for row in range(4)])
    return {
        "trainer_logprobs": trainer,
        "inference_logprobs": inference,
        "mask": mask,
        "segments": segments,
        "advantages": advantages,
    }


def test_worked_example_of_the_docstring(device: torch.device) -> None:
    found = alignment_stats_and_policy_gradient(
        torch.tensor([[-1.0, -2.0]], device=device),
        torch.tensor([[-1.5, -2.0]], device=device),
        torch.ones(1, 2, dtype=torch.bool, device=device),
        torch.tensor([[0, 0, 2, 0]]),
        torch.tensor([[1.0, -1.0]], device=device),
        loss=PolicyLoss(kind="clip", low=0.8, high=1.2),
    )
    assert found.gradient.tolist() == [[0.0, 1.0]]


def test_a_ratio_that_lies_on_a_bound_is_not_beyond_it(device: torch.device) -> None:
    # On policy the ratio is exactly 1; bounds of 1 on both sides leave such tokens the whole gradient, -A.
    logprobs = torch.tensor([[-1.0, -2.0]], device=device)
    found = alignment_stats_and_policy_gradient(
        logprobs,
        logprobs.clone(),
        torch.ones(1, 2, dtype=torch.bool, device=device),
        torch.tensor([[0, 0, 2, 0]]),
        torch.tensor([[1.0, -1.0]], device=device),
        loss=PolicyLoss(kind="clip", low=1.0, high=1.0),
    )
    assert found.gradient.tolist() == [[-1.0, 1.0]]


@pytest.mark.parametrize("loss", LOSSES)
def test_equals_autograd_of_the_eager_loss(loss: PolicyLoss, device: torch.device) -> None:
    batch = a_batch()
    found = alignment_stats_and_policy_gradient(
        **{name: value.to(device) for name, value in batch.items()}, loss=loss
    ).gradient.cpu()
    inside = batch["mask"].clone()
    for row, start, stop, _ in batch["segments"].tolist():
        inside[row, :start], inside[row, stop:] = False, False
    names = ("trainer_logprobs", "inference_logprobs", "advantages")
    leaf, *constants = (batch[name].double()[inside] for name in names)
    (expected,) = torch.autograd.grad(eager(loss, leaf.requires_grad_(), *constants).sum(), leaf)
    # A float32 log_ratio near 20 is itself rounded by 1e-6.
    torch.testing.assert_close(found[inside].double(), expected, rtol=2e-6, atol=0)
    assert (expected == 0).any() == (loss.kind == "clip")
    assert not found[~inside].any()


@pytest.mark.parametrize("loss", LOSSES[::2])
def test_the_table_is_that_without_a_gradient_to_the_bit(loss: PolicyLoss, device: torch.device) -> None:
    batch = {name: value.to(device) for name, value in a_batch().items()}
    found = alignment_stats_and_policy_gradient(**batch, loss=loss)
    del batch["advantages"]
    assert torch.equal(found.table, alignment_stats(**batch))


def test_a_tokens_gradient_is_the_same_bits_in_any_batch(device: torch.device) -> None:
    batch = {name: value.to(device) for name, value in a_batch(2000).items()}
    together = alignment_stats_and_policy_gradient(**batch, loss=CLIP).gradient
    for row in range(4):
        alone = {name: value[row : row + 1, 100:1500] for name, value in batch.items() if name != "segments"}
        found = alignment_stats_and_policy_gradient(
            **alone, segments=torch.tensor([[0, 0, 1400, 0]]), loss=CLIP
        )
        assert torch.equal(found.gradient, together[row : row + 1, 100:1500])


class _Loss(torch.autograd.Function):
    """The eager loss forward, the op's gradient backward."""

    @staticmethod
    def forward(ctx: Any, trainer: Tensor, inference: Tensor, advantages: Tensor, loss: PolicyLoss) -> Tensor:
        segments = torch.tensor([[0, 0, trainer.shape[1], 0]])
        mask = torch.ones_like(trainer, dtype=torch.bool)
        ctx.gradient = alignment_stats_and_policy_gradient(
            trainer, inference, mask, segments, advantages, loss=loss
        ).gradient
        return eager(loss, trainer, inference, advantages).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.gradient, None, None, None


@pytest.mark.parametrize("loss", LOSSES[:2])
def test_passes_gradcheck_in_float64(loss: PolicyLoss) -> None:
    inference = -normal(1, 40).abs().double()
    # No ratio within the step of finite differences of a bound.
    trainer = inference + normal(1, 40, scale=0.4, seed=3).double()
    ratio = (trainer - inference).exp()
    assert min((ratio - bound).abs().min() for bound in (0.8, 1.28)) > 1e-4
    assert torch.autograd.gradcheck(
        _Loss.apply, (trainer.requires_grad_(), inference, normal(1, 40, seed=4).double(), loss)
    )


# A clean stretch, and one so short that all of it goes token by token.
@pytest.mark.parametrize("width", [40, 9])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_not_finite_is_seen_and_what_is_excluded_has_no_gradient(
    loss: PolicyLoss, width: int, device: torch.device
) -> None:
    trainer, inference, advantages = torch.full((3, 1, width), -1.0).unbind()
    advantages = -advantages
    mask = torch.ones(1, width, dtype=torch.bool)
    trainer[0, :5] = torch.tensor([-math.inf, math.nan, math.inf, -1.0, -1.0])
    inference[0, 3] = -math.inf
    advantages[0, 4] = math.nan
    trainer[0, 5], inference[0, 6], advantages[0, 7] = math.nan, math.nan, math.nan
    mask[0, 5:8] = False
    arguments = (value.to(device) for value in (trainer, inference, mask))
    found = alignment_stats_and_policy_gradient(
        *arguments, torch.tensor([[0, 0, width, 0]]), advantages.to(device), loss=loss
    ).gradient[0]
    assert found[1:5].isnan().all()
    assert [found[at].item() for at in (0, 5, 6, 7)] == [0.0] * 4
    assert (found[8:] == -1).all()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"loss": "clip"}, DtypeError, "loss: found str, expected a PolicyLoss"),
        ({"advantages": torch.ones(4)}, ShapeError, r"advantages: found shape \[4\], expected \[4, 40\]"),
        ({"advantages": torch.ones(4, 40).half()}, DtypeError, "advantages: found torch.float16"),
        ({"advantages": torch.ones(4, 40, device="meta")}, DtypeError, "advantages: found a meta tensor"),
        ({"trainer_logprobs": None}, DtypeError, "trainer_logprobs: found NoneType"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        alignment_stats_and_policy_gradient(**{**a_batch(40), "loss": CLIP, **changes})


@pytest.mark.parametrize(
    ("kind", "low", "high", "error", "says"),
    [
        ("ppo", 0.8, 1.2, ScaleError, "kind: found 'ppo', expected 'clip' or 'cap'"),
        ("ratio", 0.8, 1.2, ScaleError, "kind: found 'ratio'"),
        ("clip", 1.2, 0.8, ScaleError, r"low 1\.2 and high 0\.8, expected 0 <= low <= high"),
        ("cap", -0.1, 0.8, ScaleError, "expected 0 <= low <= high"),
        ("cap", 0.0, math.nan, ScaleError, "high nan"),
        ("cap", None, 2.0, DtypeError, r"PolicyLoss\.low: found NoneType, expected a number"),
        ("clip", 0.8, True, DtypeError, r"PolicyLoss\.high: found bool"),
        # The epsilons of other libraries: their clamp would leave no gradient at ratio 1 where A > 0.
        ("clip", 0.2, 0.28, ScaleError, r"low <= 1 <= high: .* are low=0\.8, high=1\.28"),
        ("clip", 1.2, 1.5, ScaleError, "low <= 1 <= high"),
    ],
)
def test_a_loss_that_cannot_be_is_refused_where_it_is_made(kind, low, high, error, says):
    with pytest.raises(error, match=says):
        PolicyLoss(kind=kind, low=low, high=high)


def test_bounds_at_the_ratio_1_itself_and_caps_below_it_are_fine():
    PolicyLoss(kind="clip", low=1.0, high=1)
    PolicyLoss(kind="cap", low=0.0, high=0.5)
