"""Routed experts of a real engine, and what goes wrong with them."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import provenance, sample

from rlbatch.faults import ROUTING_FAULTS
from rlbatch.soundness import check_sound

MOE = Path(__file__).parent / "data" / "moe-vllm-0.32.0"


@pytest.fixture(scope="module")
def clean():
    samples = []
    for name in ("rollouts", "rollouts_bf16"):
        for at, row in enumerate(json.loads((MOE / f"{name}.json").read_text())["rows"]):
            experts = np.load(io.BytesIO(base64.b64decode(row["routed_experts"])))
            samples.append(
                sample(
                    row["prompt_ids"],
                    row["ids"],
                    row["lp"],
                    routed_experts=experts,
                    trajectory_id=f"{name}/{at}",
                )
            )
    return samples


def codes(samples, **changes):
    return [(each.code, each.where.sample) for each in check_sound(samples, purpose="train", **changes)]


def with_experts(experts, ids=None, **changes):
    experts = np.asarray(experts, np.uint8)
    ids = list(range(10, 10 + len(experts))) if ids is None else ids
    return sample([1], ids, [-0.5] * len(ids), routed_experts=experts, **changes)


def test_real_experts_of_both_precisions_are_sound(clean):
    assert len(clean) == 80
    assert codes(clean) == []


@pytest.mark.parametrize("code", ROUTING_FAULTS)
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_a_planted_fault_is_named_and_nothing_else_is_said(clean, code, share):
    for seed in range(3):
        planted = ROUTING_FAULTS[code].plant(clean, np.random.default_rng(seed), share=share)
        changed = {at for at, (new, old) in enumerate(zip(planted, clean, strict=True)) if new is not old}
        assert {found for found, _ in codes(planted)} == {code}
        assert changed <= {at for _, at in codes(planted)}


def test_rows_of_zeros_are_told_with_their_place():
    experts = np.array([[[0, 1]], [[2, 0]], [[0, 0]], [[0, 0]], [[1, 0]]])
    (found,) = check_sound([with_experts(experts)], purpose="train")
    assert (found.code, found.where.start, found.where.stop) == ("routing-missing", 2, 4)
    assert found.found == "nothing but zeros at 2 of 5 tokens, first at token 2"


def test_a_record_of_nothing_but_zeros_is_missing_throughout():
    (found,) = check_sound([with_experts(np.zeros((9, 3, 2)))], purpose="train")
    assert (found.code, found.where.start, found.where.stop) == ("routing-missing", 0, 9)


def test_a_dense_layer_and_a_single_choice_of_expert_0_are_no_missing_rows():
    dense = np.zeros((6, 2, 2), np.uint8)
    dense[:, 1] = [[1, 2], [0, 3], [2, 1], [3, 0], [1, 0], [0, 2]]
    assert codes([with_experts(dense)]) == []
    assert codes([with_experts([[[0]], [[1]], [[0]], [[3]]])]) == []


def test_an_expert_twice_for_one_token_is_no_choice():
    experts = np.array([[[0, 1], [2, 3]], [[2, 2], [1, 0]], [[3, 1], [0, 2]]])
    (found,) = check_sound([with_experts(experts)], purpose="train")
    assert (found.code, found.where.start, found.where.stop) == ("routing-shape", 1, 2)


def test_another_shape_than_the_provenance_or_the_other_samples_have():
    how = provenance(routing_shape=(1, 2))
    experts = np.array([[[0], [1]], [[1], [2]]])
    (found,) = check_sound([with_experts(experts, provenance=how)], purpose="train")
    assert (found.code, found.expected, found.found) == (
        "routing-shape",
        "[layers, experts a token] [1, 2], by the provenance",
        "[2, 1]",
    )
    pair = [with_experts([[[0, 1]]], trajectory_id="a"), with_experts([[[0], [1]]], trajectory_id="b")]
    assert codes(pair) == [("routing-shape", 1)]


def test_text_that_comes_again_may_be_routed_alike():
    rng = np.random.default_rng(0)
    rows = np.argsort(rng.random((12, 3, 8)), axis=2)[..., :2]
    twice = np.concatenate([rows, rows])
    ids = [*range(11, 22), 1, *range(11, 22), 30]
    assert codes([with_experts(twice, ids)]) == []
    others = [*range(11, 22), *range(40, 53)]
    (found,) = check_sound([with_experts(twice, others)], purpose="train")
    assert (found.code, found.where.start, found.where.stop) == ("routing-repeated", 12, 24)


def test_experts_in_some_samples_only_are_told(clean):
    some = [replace(clean[0], routed_experts=None), *clean[1:4]]
    assert codes(some) == [("field-missing-in-some", 0)]
