"""`kept=` against sets worked out token by token in plain Python, as vLLM 0.32's sampler defines them."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kept_by_hand import kept_by_hand
from torch import Tensor

from rlbatch_kernels import (
    NO_ID,
    DtypeError,
    KeptIds,
    ScaleError,
    ShapeError,
    TokenRangeError,
    Truncation,
    head,
    linear_logprobs,
    token_logprobs,
    truncation,
)

PROBABILITIES = (0.15, 0.5, 0.05, 0.3)


def logprobs_of_all(logits: Tensor, kept: Any, **options: Any) -> Tensor:
    """[V] logprob of every id of one row [V] of logits."""
    size = logits.shape[-1]
    return token_logprobs(
        logits.expand(size, size),
        torch.arange(size),
        temperature=options.get("temperature", 1.0),
        mask=torch.ones(size, dtype=torch.bool),
        kept=kept,
    )


def expected_of_all(logits: Tensor, ids: list[int], temperature: float = 1.0) -> Tensor:
    """[V] float64: the definition, over the ids that are kept, or others equal to the last of them."""
    scaled = logits.double() / temperature
    inside = scaled == scaled[ids].min()
    inside[ids] = True
    return (scaled - scaled[ids].logsumexp(-1)).where(inside, -math.inf)


def normal(*shape: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# Worked by hand from the probabilities .5 (id 1), .3 (id 3), .15 (id 0), .05 (id 2).
BY_HAND = [
    ({}, {0, 1, 2, 3}),
    ({"top_k": 1}, {1}),
    ({"top_k": 2}, {1, 3}),
    ({"top_k": 4}, {0, 1, 2, 3}),
    ({"top_k": 99}, {0, 1, 2, 3}),
    ({"top_p": 0.4}, {1}),
    ({"top_p": 0.79}, {1, 3}),
    ({"top_p": 0.81}, {0, 1, 3}),
    ({"min_p": 1.0}, {1}),
    ({"min_p": 0.2}, {0, 1, 3}),
    # Of the two that top_k leaves, .625 and .375, the first alone reaches .6; of all four it would not.
    ({"top_k": 2, "top_p": 0.6}, {1}),
    ({"top_p": 0.6}, {1, 3}),
    # Of the three that min_p leaves, .526 + .316 reach .82; top_p first, as SGLang has it, keeps three.
    ({"min_p": 0.2, "top_p": 0.82}, {1, 3}),
    ({"min_p": 0.2, "top_k": 1}, {1}),
]


@pytest.mark.parametrize(("rules", "ids"), BY_HAND)
def test_sets_worked_by_hand(rules: dict[str, Any], ids: set[int]) -> None:
    logits = torch.tensor(PROBABILITIES).log()
    found = logprobs_of_all(logits, Truncation(**rules)).tolist()
    total = sum(PROBABILITIES[i] for i in ids)
    expected = [math.log(p / total) if i in ids else -math.inf for i, p in enumerate(PROBABILITIES)]
    assert found == pytest.approx(expected, abs=1e-6)
    assert set(kept_by_hand(logits.tolist(), **rules)) == ids


def test_temperature_comes_first() -> None:
    # Squared, the odds are 225 : 2500 : 25 : 900, and .685 of the first alone reaches .6.
    found = logprobs_of_all(torch.tensor(PROBABILITIES).log(), Truncation(top_p=0.6), temperature=0.5)
    assert found.tolist() == [-math.inf, 0.0, -math.inf, -math.inf]


def test_all_that_equal_the_kth_are_kept() -> None:
    found = logprobs_of_all(torch.tensor([1.0, 0.0, 1.0, 1.0]), Truncation(top_k=2))
    assert found.tolist() == pytest.approx([-math.log(3), -math.inf, -math.log(3), -math.log(3)])


def test_of_equals_at_the_edge_of_the_nucleus_as_many_as_needed_are_kept_and_the_target_is_one() -> None:
    # Four of a quarter: two and a bit of them reach .6, so three are kept, whichever.
    logits = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    found = token_logprobs(
        logits,
        torch.arange(4),
        temperature=1.0,
        mask=torch.ones(4, dtype=torch.bool),
        kept=Truncation(top_p=0.6),
    )
    assert found.tolist() == pytest.approx([-math.log(3)] * 4)
    found.sum().backward()
    # Over the set that has the target: 2/3 to it, -1/3 to each of the two others.
    expected = torch.tensor([[2, 0, -1, -1], [0, 2, -1, -1], [0, -1, 2, -1], [0, -1, -1, 2]]) / 3
    torch.testing.assert_close(logits.grad, expected.double(), atol=1e-7, rtol=0)


def test_a_target_that_equals_the_one_token_kept_is_that_token() -> None:
    found = logprobs_of_all(torch.tensor([1.0, 1.0, 0.0]), Truncation(top_p=0.3))
    assert found.tolist() == [0.0, 0.0, -math.inf]


def sampled(vocab_size: int, seed: int, step: float) -> Tensor:
    """Logits on a grid, so that many are equal, with some columns that the model excludes."""
    logits = (normal(vocab_size, seed=seed) / step).round() * step
    logits[
        torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[: vocab_size // 8]
    ] = -math.inf
    return logits


@given(
    seed=st.integers(0, 2**31),
    top_k=st.integers(0, 25),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.7]),
    step=st.sampled_from([0.5, 2.0**-10]),
    num_candidates=st.sampled_from([1, 3, 100]),
)
def test_equals_the_rule_token_by_token(
    seed: int, top_k: int, top_p: float, min_p: float, step: float, num_candidates: int
) -> None:
    logits = sampled(24, seed, step).double()
    rules: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    ids = kept_by_hand((logits / 0.5).tolist(), **rules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "CANDIDATES", num_candidates)
        found = logprobs_of_all(logits, Truncation(**rules), temperature=0.5)
    torch.testing.assert_close(found, expected_of_all(logits, ids, 0.5), rtol=1e-12, atol=1e-12)


# A nucleus of thousands, wider than the candidates, in a real vocabulary.
@pytest.mark.parametrize("rules", [{"top_p": 0.99}, {"top_k": 5000, "top_p": 0.9}, {"min_p": 1e-3}])
def test_a_wide_set_of_a_real_vocabulary_is_exact_to_5e_6(rules: dict[str, Any]) -> None:
    logits = normal(1, 151936, scale=1.5)
    ids = kept_by_hand((logits[0] / 0.7).double().tolist(), **rules)
    assert len(ids) > truncation.CANDIDATES or "min_p" in rules
    found = token_logprobs(
        logits,
        torch.tensor(ids[:1]),
        temperature=0.7,
        mask=torch.ones(1, dtype=torch.bool),
        kept=Truncation(**rules),
    )
    assert abs(found.double() - expected_of_all(logits[0], ids, 0.7)[ids[0]]) <= 5e-6


def test_each_position_has_its_own_rule_and_its_own_temperature() -> None:
    logits = normal(2, 3, 17)
    kept = Truncation(
        top_k=torch.tensor([[0, 5, 0], [3, 0, 99]]),
        top_p=torch.tensor([[1.0, 0.7, 0.5], [1.0, 1.0, 0.9]]),
        min_p=torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.1, 0.0]], dtype=torch.float64),
    )
    temperature = torch.tensor([[1.0, 0.7, 1.3], [0.5, 2.0, 1.0]])
    for target in range(17):
        ids = torch.full((2, 3), target)
        found = token_logprobs(
            logits, ids, temperature=temperature, mask=torch.ones(2, 3, dtype=torch.bool), kept=kept
        )
        for place in [(row, column) for row in range(2) for column in range(3)]:
            rules = {
                "top_k": int(kept.top_k[place]),
                "top_p": float(kept.top_p[place]),
                "min_p": float(kept.min_p[place]),
            }
            at = float(temperature[place])
            members = kept_by_hand((logits[place].double() / at).tolist(), **rules)
            expected = expected_of_all(logits[place], members, at)[target]
            torch.testing.assert_close(found[place].double(), expected, rtol=1e-6, atol=5e-6)


def masked_autograd(logits: Tensor, ids: Tensor, sets: Tensor, temperature: float) -> Tensor:
    """Gradient [N, V] of the sum of logprobs by autograd, through a softmax over `sets` [N, V] bool."""
    leaf = logits.double().requires_grad_()
    scaled = (leaf / temperature).masked_fill(~sets, -math.inf)
    scaled.log_softmax(-1).gather(-1, ids[:, None]).sum().backward()
    return leaf.grad


# One rounding of the result for half precision.
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("rules", [{"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}])
def test_gradients_equal_those_of_the_softmax_over_the_set(
    dtype: torch.dtype, relative: float, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of two rows, the last one ragged.
    monkeypatch.setattr("rlbatch_kernels.softmax.TILE_ELEMENTS", 2 * 60)
    logits = normal(7, 60).to(dtype)
    # Each row's most probable token is in any set.
    ids, mask = logits.argmax(-1), torch.ones(7, dtype=torch.bool)
    sets = torch.zeros(7, 60, dtype=torch.bool)
    for row in range(7):
        sets[row, kept_by_hand((logits[row].float() / 0.7).tolist(), **rules)] = True
    leaf = logits.clone().requires_grad_()
    token_logprobs(leaf, ids, temperature=0.7, mask=mask, kept=Truncation(**rules)).sum().backward()
    expected = masked_autograd(logits, ids, sets, 0.7)
    assert leaf.grad.dtype == dtype
    assert (leaf.grad.double() - expected).norm() <= relative * expected.norm()
    assert not leaf.grad[~sets].any()


@pytest.mark.parametrize("rules", [{"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_gradients_pass_gradcheck(rules: dict[str, Any]) -> None:
    logits = normal(3, 9).double().requires_grad_()
    ids, mask = logits.argmax(-1), torch.tensor([True, False, True])
    assert torch.autograd.gradcheck(
        lambda x: token_logprobs(x, ids, temperature=0.7, mask=mask, kept=Truncation(**rules)), (logits,)
    )


@pytest.mark.parametrize("upstream", [1.0, math.nan, math.inf])
def test_a_target_outside_is_minus_infinity_and_gets_no_gradient(upstream: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 2).requires_grad_()
    mask = torch.ones(2, dtype=torch.bool)
    found = token_logprobs(logits, torch.tensor([2, 0]), temperature=1.0, mask=mask, kept=Truncation(top_k=2))
    assert found.tolist() == [-math.inf, pytest.approx(-math.log1p(math.exp(-1)))]
    found.backward(torch.tensor([upstream, 1.0]))
    assert not logits.grad[0].any()
    assert logits.grad[1].isfinite().all()
    assert logits.grad[1].any()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("kept", [Truncation(top_k=2), Truncation(top_p=0.5), Truncation(min_p=0.5)])
def test_nan_and_infinite_logits_give_nan_in_their_row_only(poison: float, kept: Truncation) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 3)
    logits[1, 0] = poison
    for target in (0, 3):
        found = token_logprobs(
            logits,
            torch.full((3,), target),
            temperature=1.0,
            mask=torch.ones(3, dtype=torch.bool),
            kept=kept,
        )
        assert found[1].isnan()
        assert not found[[0, 2]].isnan().any()


def test_nan_outside_a_replayed_set_is_seen_too() -> None:
    logits = torch.tensor([[0.0, 1.0, math.nan], [0.0, 1.0, math.inf], [0.0, 1.0, 2.0]])
    kept = KeptIds(ids=torch.tensor([[0, 1]] * 3))
    found = token_logprobs(
        logits,
        torch.zeros(3, dtype=torch.int64),
        temperature=1.0,
        mask=torch.ones(3, dtype=torch.bool),
        kept=kept,
    )
    assert found.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("kept", [Truncation(top_k=2), Truncation(top_p=0.5), Truncation(min_p=0.5)])
def test_a_row_of_minus_infinity_gives_nan(kept: Truncation) -> None:
    found = token_logprobs(
        torch.full((1, 4), -math.inf),
        torch.tensor([1]),
        temperature=1.0,
        mask=torch.tensor([True]),
        kept=kept,
    )
    assert found.isnan().all()


def test_a_nucleus_of_everything_keeps_what_top_k_excluded_out() -> None:
    # In float32 these probabilities may sum to less than p.
    found = logprobs_of_all(torch.zeros(9) + torch.arange(9) * 1e-3, Truncation(top_k=3, top_p=1 - 1e-12))
    assert (found == -math.inf).tolist() == [True] * 6 + [False] * 3


def test_replayed_sets_are_those_given() -> None:
    logits = normal(2, 11)
    members = [[3, 7, 10], [5]]
    kept = KeptIds(ids=torch.tensor([[3, 7, 10, 7], [NO_ID, 5, NO_ID, NO_ID]], dtype=torch.int32))
    for target in range(11):
        found = token_logprobs(
            logits,
            torch.full((2,), target),
            temperature=0.7,
            mask=torch.ones(2, dtype=torch.bool),
            kept=kept,
        )
        expected = [expected_of_all(logits[row], members[row], 0.7)[target] for row in range(2)]
        torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize(
    "kept",
    [
        Truncation(top_k=9),
        Truncation(top_p=0.8),
        Truncation(min_p=0.05),
        KeptIds(ids=torch.arange(0, 200, 3).expand(11, -1)),
    ],
)
def test_from_hidden_states_it_is_the_same(
    kept: Any, soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "TOKEN_TILE", 4)
    monkeypatch.setattr(head, "WHOLE_ROWS_TILE", 4)
    monkeypatch.setattr(head, "VOCAB_TILE", 32)
    leaves = [normal(11, 8, scale=1, seed=1), normal(200, 8, scale=1, seed=2), normal(200, scale=1, seed=3)]
    hidden, weight, bias = (leaf.double().requires_grad_() for leaf in leaves)
    mask = torch.arange(11) % 4 != 2

    def logits_of() -> Tensor:
        logits = (hidden @ weight.T + bias) * 0.8
        return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)

    # Members of every kind of set: the most probable, and of those that are listed the first.
    ids = torch.zeros(11, dtype=torch.int64) if isinstance(kept, KeptIds) else logits_of().argmax(-1)
    found = linear_logprobs(
        hidden,
        weight,
        ids,
        temperature=0.7,
        mask=mask,
        bias=bias,
        logit_scale=0.8,
        soft_cap=soft_cap,
        kept=kept,
    )
    expected = token_logprobs(logits_of(), ids, temperature=0.7, mask=mask, kept=kept)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = normal(11, seed=4).double()
    grads = torch.autograd.grad((found * upstream).sum(), (hidden, weight, bias))
    for grad, other in zip(
        grads, torch.autograd.grad((expected * upstream).sum(), (hidden, weight, bias)), strict=True
    ):
        torch.testing.assert_close(grad, other, rtol=1e-9, atol=1e-9)


def test_the_edge_of_a_half_precision_head_stays_inside_in_the_backward() -> None:
    # A set of one: were its logit computed otherwise in the backward, the set would be empty and give NaN.
    hidden, weight = normal(70, 48, seed=1).bfloat16().requires_grad_(), normal(9000, 48, seed=2).bfloat16()
    ids = (hidden.detach().float() @ weight.float().T).argmax(-1)
    found = linear_logprobs(
        hidden, weight, ids, temperature=0.7, mask=torch.ones(70, dtype=torch.bool), kept=Truncation(top_k=1)
    )
    assert found.tolist() == [0.0] * 70
    found.sum().backward()
    assert not hidden.grad.any()


# bfloat16 logits tie often, so that edges are decided by id.
@pytest.mark.parametrize("kept", [Truncation(top_k=9), Truncation(top_p=0.8), Truncation(min_p=0.05)])
def test_sets_of_a_head_that_rounds_are_those_of_its_rounded_logits(kept: Truncation) -> None:
    hidden, weight = normal(70, 48, scale=1, seed=1).bfloat16(), normal(5000, 48, scale=0.4).bfloat16()
    ids, mask = torch.arange(70), torch.ones(70, dtype=torch.bool)
    logits = hidden @ weight.T
    ids[::2] = logits.argmax(-1)[::2]
    call: dict[str, Any] = {"temperature": 0.7, "mask": mask, "kept": kept}
    found = linear_logprobs(hidden, weight, ids, logits_dtype=torch.bfloat16, **call)
    expected = token_logprobs(logits, ids, **call)
    assert (found == -math.inf).any()
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("kept", [Truncation(top_k=3), KeptIds(ids=torch.arange(0, 50, 3).expand(6, -1))])
def test_a_gradient_in_place_is_the_same_gradient(kept: Any) -> None:
    call: dict[str, Any] = {"temperature": 0.7, "mask": torch.arange(6) % 3 != 1, "kept": kept}
    grads = []
    for in_place in (False, True):
        leaf = normal(6, 50)
        # The target is in every set.
        leaf[:, 0] = 5.0
        leaf.requires_grad_()
        ids = torch.zeros(6, dtype=torch.int64)
        token_logprobs(leaf * 1.0, ids, **call, in_place_backward=in_place).sum().backward()
        grads.append(leaf.grad)
    assert grads[0].any()
    assert torch.equal(grads[0], grads[1])


def test_nothing_trained_needs_no_set() -> None:
    logits, mask = torch.full((2, 4), math.nan), torch.zeros(2, dtype=torch.bool)
    ids = torch.full((2,), -100)
    for kept in (
        Truncation(top_k=torch.full((2,), -5), top_p=torch.full((2,), math.nan)),
        KeptIds(ids=torch.full((2, 3), 99)),
    ):
        found = token_logprobs(logits, ids, temperature=1.0, mask=mask, kept=kept)
        assert found.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("kept", "error", "text"),
    [
        ({"top_k": 3}, DtypeError, "kept: found dict, expected a Truncation, a KeptIds or None"),
        (Truncation(top_k=-1), ScaleError, r"kept.top_k: found -1, expected 0 \(off\) or above"),
        (Truncation(top_k=2.0), DtypeError, "kept.top_k: found float 2.0, expected an int or a tensor"),
        (Truncation(top_k=True), DtypeError, "kept.top_k: found bool True"),
        (Truncation(top_p=0.0), ScaleError, "kept.top_p: found 0.0, expected above 0 and at most 1"),
        (Truncation(top_p=math.nan), ScaleError, "kept.top_p: found nan"),
        (Truncation(min_p=1.5), ScaleError, "kept.min_p: found 1.5, expected from 0"),
        (
            Truncation(top_p=torch.tensor([0.5, 1.5])),
            ScaleError,
            r"kept.top_p: found top_p 1.5 at \(1,\); expected above 0 and at most 1 \(off\) at every trained",
        ),
        (
            Truncation(top_p=torch.ones(2, dtype=torch.bfloat16)),
            DtypeError,
            "kept.top_p: found torch.bfloat16",
        ),
        (Truncation(top_k=torch.ones(3, dtype=torch.int64)), ShapeError, r"kept.top_k: found shape \[3\]"),
        (KeptIds(ids=torch.zeros(2, 1)), DtypeError, "kept.ids: found torch.float32"),
        (
            KeptIds(ids=torch.zeros(2, dtype=torch.int64)),
            ShapeError,
            r"kept.ids: found shape \[2\], expected \[2, K\]",
        ),
        (
            KeptIds(ids=torch.tensor([[0, 1], [2, 5]])),
            TokenRangeError,
            r"kept.ids: found id 5 at \(1,\); expected 0 <= id < 5 \(V\), or -1",
        ),
        (KeptIds(ids=torch.tensor([[0, -2], [2, 3]])), TokenRangeError, r"kept.ids: found id -2 at \(0,\)"),
        (
            KeptIds(ids=torch.tensor([[0, 1], [-1, -1]])),
            ShapeError,
            r"kept.ids: found size 0 at \(1,\); expected an id at every trained position",
        ),
    ],
)
def test_what_is_no_set_is_refused_by_name(kept: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        token_logprobs(
            torch.zeros(2, 5),
            torch.tensor([0, 2]),
            temperature=1.0,
            mask=torch.ones(2, dtype=torch.bool),
            kept=kept,
        )


def test_a_set_over_a_sharded_vocabulary_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="kept: a kept set over a sharded vocabulary"):
        token_logprobs(
            torch.zeros(2, 5),
            torch.tensor([0, 2]),
            temperature=1.0,
            mask=torch.ones(2, dtype=torch.bool),
            kept=Truncation(top_k=1),
            group=object(),
        )


@pytest.mark.parametrize("count", [1, 2, 3, 7, 65])
def test_from_hidden_states_a_token_alone_has_the_same_bits_as_in_its_batch(count: int) -> None:
    hidden, weight = normal(200, 96, scale=1, seed=1), normal(3000, 96, scale=0.2, seed=2)
    ids, mask = torch.arange(200), torch.ones(200, dtype=torch.bool)
    call: dict[str, Any] = {"temperature": 0.7, "kept": Truncation(top_k=0)}
    together = linear_logprobs(hidden, weight, ids, mask=mask, **call)
    alone = linear_logprobs(hidden[:count], weight, ids[:count], mask=mask[:count], **call)
    assert torch.equal(alone, together[:count])
