"""The fused forward of a head: on a GPU where there is one, else on the interpreter."""

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from rlbatch_kernels import linear_logprobs, triton_library, triton_linear
from rlbatch_kernels.head import Head

if triton_library.missing() is not None:
    pytest.skip(str(triton_library.missing()), allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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


@pytest.fixture(autouse=True)
def _no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward here may go by tiles of logits."""

    def fail(*arguments: object) -> None:
        raise AssertionError("found tiles of logits, expected the fused kernel")

    monkeypatch.setattr(Head, "tiles_of", fail)


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def problem(
    num_tokens: int, vocab_size: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight, ids; logits have a standard deviation of 3, and the last id is among the targets."""
    ids = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(4))
    ids[0] = vocab_size - 1
    weight = normal(vocab_size, width, scale=3 / math.sqrt(width), seed=1)
    return normal(num_tokens, width).to(dtype), weight.to(dtype), ids


def fused(hidden: Tensor, weight: Tensor, ids: Tensor, device: torch.device, **options: Any) -> Tensor:
    """Through the public op; all trained unless a mask is given."""
    given = {"temperature": 0.7, "mask": torch.ones(ids.shape, dtype=torch.bool), **options}
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    tensors = (hidden.to(device), weight.to(device), ids.to(device))
    return linear_logprobs(*tensors, backend="triton", **moved).cpu()


def truth(logits: Tensor, ids: Tensor) -> Tensor:
    """At temperature 0.7."""
    return (logits / 0.7).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert ((found.double() - expected).abs() <= 5e-6 + 2**-23 * expected.abs()).all()


# Tokens and columns round a tile of 128; 1024 columns are a piece, 2100 three with a ragged last; widths
# round a step of 64, and of no multiple of 8, where rows are not read in vectors.
@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "width"),
    [
        (1, 1, 1),
        (127, 127, 64),
        (128, 128, 63),
        (129, 129, 65),
        (3, 1023, 16),
        (2, 1025, 128),
        (130, 2100, 8),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_fused_head_equals_float64(
    device: torch.device, num_tokens: int, vocab_size: int, width: int, dtype: torch.dtype
) -> None:
    hidden, weight, ids = problem(num_tokens, vocab_size, width, dtype)
    found = fused(hidden, weight, ids, device)
    assert_near(found, truth(hidden.double() @ weight.double().T, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_fused_head_scales_caps_masks_and_adds_a_bias(
    device: torch.device, dtype: torch.dtype
) -> None:
    hidden, weight, ids = problem(40, 1200, 24, dtype)
    bias, counts = normal(1200, seed=2).to(dtype), torch.arange(1200) % 7 != 3
    counts[ids] = True
    found = fused(hidden, weight, ids, device, bias=bias, logit_scale=0.8, soft_cap=5.0, vocab_mask=counts)
    raw = (hidden.double() @ weight.double().T + bias.double()) * 0.8
    expected = truth((5 * torch.tanh(raw / 5)).masked_fill(~counts, -math.inf), ids)
    assert_near(found, expected)


def test_triton_fused_head_reads_trained_rows_where_they_lie(device: torch.device) -> None:
    hidden, weight, ids = problem(12, 150, 16, torch.bfloat16)
    # Every other row of a tensor twice as wide, whose untrained rows are NaN: the first row too.
    around = torch.full((3, 4, 32), math.nan, dtype=torch.bfloat16, device=device)
    mask = (torch.arange(12) % 3 != 0).reshape(3, 4)
    around[:, :, 8:24] = torch.where(mask.unsqueeze(-1), hidden.reshape(3, 4, 16), math.nan).to(device)
    temperature = torch.rand(3, 4, generator=torch.Generator().manual_seed(3)) + 0.5
    found = linear_logprobs(
        around[:, :, 8:24],
        weight.to(device),
        ids.reshape(3, 4).to(device),
        temperature=temperature.to(device),
        mask=mask.to(device),
        backend="triton",
    ).cpu()
    logits = hidden.double() @ weight.double().T / temperature.flatten().unsqueeze(-1)
    expected = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).reshape(3, 4)
    assert_near(found[mask], expected[mask])
    assert not found[~mask].any()


def test_triton_fused_head_gives_a_token_the_same_bits_in_any_batch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, ids = problem(140, 1100, 72, torch.bfloat16)
    together = fused(hidden, weight, ids, device)
    for rows in (slice(0, 1), slice(127, 130), slice(3, 140)):
        assert torch.equal(fused(hidden[rows], weight, ids[rows], device), together[rows])
    monkeypatch.setattr(triton_linear, "TOKENS", 64)
    assert torch.equal(fused(hidden, weight, ids, device), together)


def test_triton_fused_head_reports_what_is_not_finite(device: torch.device) -> None:
    hidden, weight, ids = problem(4, 200, 16, torch.bfloat16)
    hidden[1, 3], bias = math.nan, torch.zeros(200)
    assert fused(hidden, weight, ids, device).isnan().tolist() == [False, True, False, False]
    # A tile of nothing but -inf adds nothing; nothing but -inf is no distribution.
    bias[:128] = -math.inf
    ids[:] = torch.tensor([199, 150, 130, 5])
    found = fused(hidden, weight, ids, device, bias=bias)
    exact = truth((hidden.double() @ weight.double().T)[:, 128:], ids.clamp(min=128) - 128)
    assert_near(found[[0, 2]], exact[[0, 2]])
    assert found[3] == -math.inf
    bias[:] = -math.inf
    assert fused(hidden, weight, ids, device, bias=bias).isnan().all()


def test_triton_gradients_after_a_fused_forward_equal_float64(device: torch.device) -> None:
    hidden, weight, ids = problem(30, 300, 24, torch.bfloat16)
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    leaves = [hidden.clone().to(device).requires_grad_(), weight.clone().to(device).requires_grad_()]
    fused(*leaves, ids, device, soft_cap=6.0).sum().backward()
    truth(6 * torch.tanh(exact[0] @ exact[1].T / 6), ids).sum().backward()
    for leaf, expected in zip(leaves, exact, strict=True):
        assert (leaf.grad.cpu().double() - expected.grad).norm() <= 5e-3 * expected.grad.norm()
