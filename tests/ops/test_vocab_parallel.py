"""`group=` on two and three gloo processes with uneven shards, against the unsharded float64 definition.

Each rank computes everything once and saves it; the tests compare what all ranks have saved.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from rlbatch_kernels import (
    GroupError,
    ShapeError,
    TokenRangeError,
    VocabGroup,
    linear_logprobs,
    token_logprobs,
)

# By number of ranks. The last rank of three holds one column, and no token of the batch has its target there.
SIZES = {2: (600, 403), 3: (500, 502, 1)}
VOCAB_SIZE = 1003
# First and last column of every shard but the one without targets, and some inside.
TARGETS = (0, 599, 600, 499, 500, 1001, 37, 700, 250)
TEMPERATURE = 0.7
SOFT_CAPS = (None, 5.0)
# Columns that count: for the logits all but the last, which is all that the last rank of three holds.
NUM_IDS = 1002
LINEAR_MASK = torch.arange(VOCAB_SIZE) % 10 != 3


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def problem() -> dict[str, Tensor]:
    """Nine positions, all but one trained; an excluded column, and a row with a whole shard excluded."""
    logits = normal(9, VOCAB_SIZE, scale=3)
    logits[:, 11] = -math.inf
    logits[3, :500] = -math.inf
    return {
        "logits": logits,
        "hidden": normal(9, 24, seed=1),
        "weight": normal(VOCAB_SIZE, 24, scale=0.6, seed=2),
        "bias": normal(VOCAB_SIZE, seed=3),
        "ids": torch.tensor(TARGETS),
        "mask": torch.arange(9) % 5 != 4,
        "temperature": torch.rand(9, generator=torch.Generator().manual_seed(4)) + 0.5,
        "upstream": normal(9, seed=5),
    }


def exact(soft_cap: float | None) -> dict[str, Tensor]:
    """Values and gradients of the whole, in float64 by autograd."""
    given = {
        name: value.double() if value.is_floating_point() else value for name, value in problem().items()
    }
    logits, hidden, weight, bias = (
        given[name].requires_grad_() for name in ("logits", "hidden", "weight", "bias")
    )

    def chosen(values: Tensor) -> Tensor:
        logprobs = (values / given["temperature"][:, None]).log_softmax(-1)
        return logprobs.gather(-1, given["ids"][:, None])[:, 0].where(given["mask"], 0.0)

    product = (hidden @ weight.T + bias) * 0.8
    product = product if soft_cap is None else soft_cap * torch.tanh(product / soft_cap)
    token = chosen(logits.masked_fill(torch.arange(VOCAB_SIZE) >= NUM_IDS, -math.inf))
    linear = chosen(product.masked_fill(~LINEAR_MASK, -math.inf))
    (grad_logits,) = torch.autograd.grad((token * given["upstream"]).sum(), logits)
    grads = torch.autograd.grad((linear * given["upstream"]).sum(), (hidden, weight, bias))
    named = dict(zip(("grad_hidden", "grad_weight", "grad_bias"), grads, strict=True))
    return {"token": token.detach(), "linear": linear.detach(), "grad_logits": grad_logits, **named}


def sharded(group: VocabGroup, soft_cap: float | None) -> dict[str, Tensor]:
    """The same on one rank, from its own columns."""
    given = problem()
    own = slice(group.first_column, group.first_column + group.sizes[group.rank])
    logits = given["logits"][:, own].clone().requires_grad_()
    hidden = given["hidden"].requires_grad_()
    weight, bias = (given[name][own].clone().requires_grad_() for name in ("weight", "bias"))
    common: dict[str, Any] = {"temperature": given["temperature"], "mask": given["mask"], "group": group}
    token = token_logprobs(logits, given["ids"], vocab_mask=NUM_IDS, **common)
    common |= {"vocab_mask": LINEAR_MASK, "soft_cap": soft_cap}
    linear = linear_logprobs(hidden, weight, given["ids"], bias=bias, logit_scale=0.8, **common)
    (token * given["upstream"]).sum().backward()
    (linear * given["upstream"]).sum().backward()
    leaves = {"logits": logits, "hidden": hidden, "weight": weight, "bias": bias}
    grads = {f"grad_{name}": leaf.grad for name, leaf in leaves.items()}
    return {"token": token.detach(), "linear": linear.detach(), **grads}


def refusals(group: VocabGroup) -> dict[str, str]:
    """What each mistake is answered with on this rank."""
    size, rank = group.sizes[group.rank], group.rank
    every, ids = torch.ones(2, dtype=torch.bool), torch.tensor([5, 700])
    mistakes: dict[str, Any] = {
        # Rank 0 trains one token more; then as many as the others, but another one with the same target.
        "count": ((torch.zeros(2, size), ids), {"temperature": 1.0, "mask": torch.tensor([rank == 0, True])}),
        "mask": (
            (torch.zeros(2, size), torch.tensor([5, 5])),
            {"temperature": 1.0, "mask": torch.tensor([rank == 0, rank > 0])},
        ),
        # A batch of one's own: data parallel, not tensor parallel.
        "ids": ((torch.zeros(2, size), ids + rank), {"temperature": 1.0}),
        "temperature": ((torch.zeros(2, size), ids), {"temperature": 1.0 + rank}),
        "columns": ((torch.zeros(2, size + 1), ids), {"temperature": 1.0}),
        # One target of 5 and 700, which another rank may hold.
        "excluded": ((torch.zeros(2, size), ids), {"temperature": 1.0, "vocab_mask": 700}),
    }
    told = {}
    for name, (arguments, options) in mistakes.items():
        try:
            token_logprobs(*arguments, group=group, **{"mask": every, **options})
        except (GroupError, ShapeError, TokenRangeError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    try:
        VocabGroup.of(group.process_group, rank, device="cpu")
    except ShapeError as error:
        told["empty"] = str(error)
    return told


def same_bits(group: VocabGroup) -> list[bool]:
    """Whether the first tokens of 200 have, without the others, the logprobs that they have among them."""
    hidden, weight = normal(200, 96), normal(group.sizes[group.rank], 96, scale=0.2, seed=1)
    ids, mask = torch.arange(200), torch.ones(200, dtype=torch.bool)
    call: dict[str, Any] = {"temperature": 0.7, "group": group}
    together = linear_logprobs(hidden, weight, ids, mask=mask, **call)
    alone = {n: linear_logprobs(hidden[:n], weight, ids[:n], mask=mask[:n], **call) for n in (1, 2, 3, 7, 65)}
    return [torch.equal(found, together[:n]) for n, found in alone.items()]


def rounded_bits(group: VocabGroup) -> bool:
    """Whether a head that rounds gives this rank the logprobs of its rounded logits, in place or not."""
    own = slice(group.first_column, group.first_column + group.sizes[group.rank])
    hidden, weight = normal(9, 32).bfloat16(), normal(VOCAB_SIZE, 32, scale=0.3, seed=1).bfloat16()[own]
    call: dict[str, Any] = {"temperature": 0.7, "mask": torch.ones(9, dtype=torch.bool), "group": group}
    ids, leaf = torch.tensor(TARGETS), (hidden @ weight.T).requires_grad_()
    linear = linear_logprobs(hidden, weight, ids, logits_dtype=torch.bfloat16, **call)
    grads = []
    for in_place in (False, True):
        token = token_logprobs(leaf * 1.0, ids, in_place_backward=in_place, **call)
        grads.append(torch.autograd.grad(token.sum(), leaf)[0])
    return bool((linear - token).abs().max() <= 5e-6) and torch.equal(*grads)


def rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    num_ranks = max(SIZES)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=num_ranks)
    for world, sizes in SIZES.items():
        # Every process must take part in making a group, members or not.
        processes = dist.new_group(list(range(world)))
        if rank < world:
            group = VocabGroup.of(processes, sizes[rank], device="cpu")
            torch.save(answer_of(group), folder / f"{rank} of {world}.pt")
    dist.destroy_process_group()


def answer_of(group: VocabGroup) -> dict[Any, Any]:
    """All that one rank of a group computes."""
    answer: dict[Any, Any] = {cap: sharded(group, cap) for cap in SOFT_CAPS}
    answer["poisoned"] = poisoned(group)
    answer["bits"] = same_bits(group)
    answer["rounded"] = rounded_bits(group)
    answer["refusals"] = refusals(group)
    answer["facts"] = (group.vocab_size, group.first_column)
    return answer


def poisoned(group: VocabGroup) -> Tensor:
    """Logprobs where NaN, +inf, and a row of -inf lie in the columns of one rank or of all."""
    logits = torch.zeros(4, group.sizes[group.rank])
    if group.rank == 0:
        logits[1, 3], logits[2, 3] = math.nan, math.inf
    logits[3] = -math.inf
    ids, mask = torch.full((4,), 700), torch.ones(4, dtype=torch.bool)
    return token_logprobs(logits, ids, temperature=1.0, mask=mask, group=group)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where each rank of each group has saved what it computed."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(rank_main, args=(folder,), nprocs=max(SIZES))
    return folder


@pytest.fixture(params=SIZES)
def answers(request: pytest.FixtureRequest, saved: Path) -> list[dict[Any, Any]]:
    """What each rank of a group computed."""
    return [torch.load(saved / f"{rank} of {request.param}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("soft_cap", SOFT_CAPS)
def test_values_equal_the_unsharded_ones_and_are_the_same_bits_on_every_rank(
    answers: list[dict[Any, Any]], soft_cap: float | None
) -> None:
    expected = exact(soft_cap)
    for name in ("token", "linear"):
        for answer in answers:
            assert torch.equal(answer[soft_cap][name], answers[0][soft_cap][name])
        torch.testing.assert_close(answers[0][soft_cap][name].double(), expected[name], atol=5e-6, rtol=0)


@pytest.mark.parametrize("soft_cap", SOFT_CAPS)
def test_the_gradient_of_hidden_is_whole_on_every_rank(
    answers: list[dict[Any, Any]], soft_cap: float | None
) -> None:
    expected = exact(soft_cap)["grad_hidden"]
    for answer in answers:
        assert torch.equal(answer[soft_cap]["grad_hidden"], answers[0][soft_cap]["grad_hidden"])
        apart = (answer[soft_cap]["grad_hidden"].double() - expected).norm()
        assert apart <= 1e-6 * expected.norm()


@pytest.mark.parametrize("soft_cap", SOFT_CAPS)
@pytest.mark.parametrize(("name", "axis"), [("logits", 1), ("weight", 0), ("bias", 0)])
def test_each_ranks_own_gradients_together_are_those_of_the_whole(
    answers: list[dict[Any, Any]], name: str, axis: int, soft_cap: float | None
) -> None:
    expected = exact(soft_cap)[f"grad_{name}"]
    found = torch.cat([answer[soft_cap][f"grad_{name}"] for answer in answers], dim=axis).double()
    assert found.shape == expected.shape
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_each_rank_knows_its_place(answers: list[dict[Any, Any]]) -> None:
    sizes = SIZES[len(answers)]
    for rank, answer in enumerate(answers):
        assert answer["facts"] == (VOCAB_SIZE, sum(sizes[:rank]))


def test_what_is_not_finite_on_one_rank_is_nan_on_all(answers: list[dict[Any, Any]]) -> None:
    for answer in answers:
        assert answer["poisoned"].isnan().tolist() == [False, True, True, True]
        assert answer["poisoned"][0].item() == pytest.approx(-math.log(VOCAB_SIZE), abs=1e-6)


def test_a_token_alone_has_the_same_bits_as_in_its_batch(answers: list[dict[Any, Any]]) -> None:
    for answer in answers:
        assert answer["bits"] == [True] * 5


def test_logits_in_bfloat16_and_gradients_in_place_are_taken_too(answers: list[dict[Any, Any]]) -> None:
    assert [answer["rounded"] for answer in answers] == [True] * len(answers)


def test_ranks_that_disagree_are_told_so_on_every_rank(answers: list[dict[Any, Any]]) -> None:
    ranks = range(len(answers))
    for rank, answer in enumerate(answers):
        told = answer["refusals"]
        counts = [2, *[1] * (len(answers) - 1)]
        assert f"GroupError: mask: found {counts} trained tokens by rank, expected the same" in told["count"]
        places = [0.0, *[1.0] * (len(answers) - 1)]
        assert f"GroupError: mask (flat position): found {places} by rank at trained token 0" in told["mask"]
        assert f"GroupError: target_ids: found {[5.0 + at for at in ranks]} by rank at trained" in told["ids"]
        assert f"GroupError: temperature: found {[1.0 + at for at in ranks]} by rank" in told["temperature"]
        size = SIZES[len(answers)][rank]
        assert (
            f"logits: found {size + 1} columns, expected {size}, the share of rank {rank}" in told["columns"]
        )
        assert "target_ids: found id 700 at (1,), which vocab_mask excludes" in told["excluded"]
        assert f"num_columns: found {list(ranks)} by rank, expected at least 1" in told["empty"]
