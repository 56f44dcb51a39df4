"""Ranks derive one plan: every sample once, as many batches each, and one normaliser."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import trajectory, turn
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_cases import each_once, names_in, numbered, numbered_samples, write_store

from rlbatch.alignment import require_aligned
from rlbatch.assemble import to_samples
from rlbatch.collate import Padding
from rlbatch.errors import RecordError, SoundnessError, StorageError
from rlbatch.loader import Checks, Feed, RolloutLoader, Steps
from rlbatch.packing import Cost
from rlbatch.records import MediaArray

SAMPLES = numbered_samples(83)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("ranks") / "store", SAMPLES)


def loaders(store, num_ranks, **options):
    shared = {"layout": "packed", "max_tokens": 64, "feed": Feed(prefetch=0)} | options
    steps = shared.pop("steps", {})
    return [
        RolloutLoader(store, **shared, steps=Steps(rank=rank, num_ranks=num_ranks, **steps))
        for rank in range(num_ranks)
    ]


@settings(max_examples=25)
@given(
    num_ranks=st.integers(1, 9),
    step_samples=st.integers(1, 100),
    seed=st.none() | st.integers(0, 99),
    layout=st.sampled_from(["padded", "packed"]),
    multiples=st.sampled_from([(1, 1), (4, 4), (4, 6)]),
    quadratic=st.sampled_from([0.0, 0.1]),
)
def test_any_ranks_any_seed_partition_every_epoch(
    store, num_ranks, step_samples, seed, layout, multiples, quadratic
):
    steps = {"step_samples": step_samples, "seed": seed, "cost": Cost(quadratic=quadratic)}
    of_sequence, of_row = multiples
    padding = Padding(sequence_multiple=of_sequence, row_multiple=of_row)
    ranks = loaders(store, num_ranks, layout=layout, padding=padding, steps=steps)
    batches = [list(loader) for loader in ranks]
    assert len({len(own) for own in batches}) == 1
    num_steps = -(-len(SAMPLES) // step_samples)
    assert {loader.num_steps for loader in ranks} == {num_steps}
    assert {batch.step.step for own in batches for batch in own} == set(range(num_steps))
    assert each_once([batch for own in batches for batch in own], SAMPLES)
    assert all(batch.input_ids.numel() <= 64 for own in batches for batch in own)


def test_a_step_says_what_all_ranks_hold_together(store):
    batches = [list(loader) for loader in loaders(store, 3, steps={"step_samples": 40})]
    assert {batch.step.step for own in batches for batch in own} == {0, 1, 2}
    for number, members in enumerate([SAMPLES[:40], SAMPLES[40:80], SAMPLES[80:]]):
        of_step = [batch for own in batches for batch in own if batch.step.step == number]
        trained = sum(int(made.loss_mask.sum()) for made in members)
        for batch in of_step:
            assert batch.step.num_loss_tokens == trained
            assert batch.step.num_samples == batch.step.num_trajectories == len(members)
            assert batch.step.num_tokens == sum(map(len, members))
        assert sum(batch.num_loss_tokens for batch in of_step) == trained
        assert sum(batch.num_trajectories for batch in of_step) == len(members)


def branched(number):
    """A trajectory whose second prompt does not extend the first: two samples of one turn each."""
    turns = [turn([first, 5], [number % 90 + 1, 2], [-0.5, -0.25]) for first in (1, 3)]
    return to_samples(trajectory(*turns, trajectory_id=f"t{number}", advantage=1.0))


@pytest.mark.parametrize("seed", [None, 3])
def test_what_one_trajectory_became_comes_in_one_step_that_counts_it_once(tmp_path, seed):
    # Three trajectories of two samples and one of one; a step of three has room for one of the former.
    samples = [*branched(0), *branched(1), *branched(2), numbered(9)]
    store = write_store(tmp_path / "store", samples)
    (loader,) = loaders(store, 1, steps={"step_samples": 3, "seed": seed})
    batches = list(loader)
    assert each_once(batches, samples)
    steps_of = {name: set() for name in ("t0", "t1", "t2", "t9")}
    for batch in batches:
        for ref in batch.refs:
            steps_of[ref.trajectory_id].add(batch.step.step)
    assert all(len(steps) == 1 for steps in steps_of.values())
    for number in range(loader.num_steps):
        of_step = [batch for batch in batches if batch.step.step == number]
        members = sum({number} == steps for steps in steps_of.values())
        assert {batch.step.num_trajectories for batch in of_step} == {members}
        assert sum(batch.num_trajectories for batch in of_step) == members
    # In stored order the single one still fits behind the last pair.
    if seed is None:
        assert [steps_of[name] for name in ("t0", "t1", "t2", "t9")] == [{0}, {1}, {2}, {2}]


def test_ranks_that_judge_by_other_versions_can_be_told(tmp_path):
    store = write_store(tmp_path / "store", [numbered(number, version=number) for number in range(8)])
    infos = []
    for rank, version in ((0, 8), (1, 8), (1, 12)):
        aside = tmp_path / f"aside{len(infos)}"
        checks = Checks(max_version_lag=6, on_fault="quarantine", quarantine=aside)
        loader = RolloutLoader(
            store, layout="packed", max_tokens=64, checks=checks, steps=Steps(rank=rank, num_ranks=2)
        )
        loader.trainer_version = version
        infos.append(next(iter(loader)).step)
    assert [info.trainer_version for info in infos] == [8, 8, 12]
    same, also, other = (info.samples_crc32 for info in infos)
    assert same == also != other
    (alone,) = loaders(store, 1)
    info = next(iter(alone)).step
    assert (info.trainer_version, info.samples_crc32) == (None, None)


def test_the_last_batch_of_a_step_says_so(store):
    (loader,) = loaders(store, 1, steps={"step_samples": 40})
    infos = [batch.step for batch in loader]
    for number in range(3):
        own = [info for info in infos if info.step == number]
        assert [info.index for info in own] == list(range(own[0].num_batches))
        assert [info.is_last for info in own] == [False] * (len(own) - 1) + [True]


def test_fewer_samples_than_ranks_give_fillers_that_count_nowhere(tmp_path):
    store = write_store(tmp_path / "store", [numbered(0), numbered(1)])
    batches = [list(loader) for loader in loaders(store, 4)]
    assert [len(own) for own in batches] == [1, 1, 1, 1]
    fillers = [batch for (batch,) in batches if not names_in([batch])]
    assert len(fillers) == 2
    for filler in fillers:
        assert filler.num_loss_tokens == filler.num_trajectories == 0
        assert not filler.loss_mask.any()
        assert filler.shape == (1, 2)
        assert filler.step.num_samples == 2
    metrics = loaders(store, 4)[3]
    list(metrics)
    assert metrics.metrics()["rlbatch/loader_num_fillers/sum"] == 1


def test_a_filler_has_the_optional_fields_of_its_step(tmp_path):
    made = numbered(0)
    taught = replace(made, ref_logprobs=np.where(made.loss_mask, np.float32(-0.5), np.float32("nan")))
    (real,), (filler,) = (list(one) for one in loaders(write_store(tmp_path / "store", [taught]), 2))
    assert (real.ref_logprobs[real.loss_mask] == -0.5).all()
    assert filler.ref_logprobs.shape == (1, 2)
    assert filler.ref_logprobs.isnan().all()
    assert filler.inference_logprobs.isnan().all()
    assert filler.temperature.tolist() == [[1.0, 1.0]]
    assert filler.teacher_logprobs is None


def test_a_filler_has_routed_experts_in_the_form_of_its_step(tmp_path):
    made = numbered(0)
    chosen = np.array([[[5, 2, 7], [1, 0, 3]]] * (len(made) - 1), np.uint8)
    store = write_store(tmp_path / "store", [replace(made, routed_experts=chosen)])
    (real,), (filler,) = (list(one) for one in loaders(store, 2))
    assert real.routed_experts.shape == (1, len(made), 2, 3)
    # Distinct experts in each layer, and none where no token is passed through.
    assert filler.routed_experts.tolist() == [[[[0, 1, 2], [0, 1, 2]], [[-1] * 3, [-1] * 3]]]
    assert filler.num_loss_tokens == 0


def test_a_filler_has_media_and_the_ids_that_they_belong_to(tmp_path):
    def shown(made, rows):
        pixels = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3) / rows
        return replace(made, media=(MediaArray(name="pixel_values", values=pixels),))

    samples = [shown(numbered(0, length=9), 4), shown(numbered(1, length=7), 2), numbered(2, length=4)]
    store = write_store(tmp_path / "store", samples)
    batches = [list(one) for one in loaders(store, 4, layout="padded")]
    (filler,) = [batch for own in batches for batch in own if not names_in([batch])]
    # Those of the shortest sample that has any, and nothing of it is trained.
    assert filler.input_ids.tolist() == [samples[1].token_ids.tolist()]
    assert [part.num_rows for part in filler.media] == [(2,)]
    assert filler.media[0].values.tolist() == samples[1].media[0].values.tolist()
    assert filler.position_ids is None
    assert filler.num_loss_tokens == filler.num_trajectories == 0
    assert not filler.loss_mask.any()
    assert filler.inference_logprobs.isnan().all()


def test_a_filler_with_media_is_not_made_of_a_shard_that_changed(tmp_path):
    media = (MediaArray(name="pixel_values", values=np.ones((2, 3), np.float32)),)
    # Three batches of one sample on two ranks: the second batch of one rank is a filler.
    samples = [replace(numbered(number, length=40), media=media) for number in range(3)]
    store = write_store(tmp_path / "store", samples)
    (loader,) = [one for one in loaders(store, 2, layout="padded") if not names_in(list(one)[1:])]
    batches = iter(loader)
    assert names_in([next(batches)])
    (shard,) = store.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes())
    with pytest.raises(StorageError, match=r"\[store-changed\].*000000.safetensors"):
        next(batches)


def test_a_step_with_a_filler_is_aligned_without_a_word(tmp_path):
    store = write_store(tmp_path / "store", [numbered(0)])
    (real,), (filler,) = (list(loader) for loader in loaders(store, 2))
    logprobs = [torch.where(batch.loss_mask, batch.inference_logprobs, 0.0) for batch in (real, filler)]
    aligned = require_aligned([real, filler], logprobs, trainer_version=0)
    assert not any(finding.code == "nothing-trained" for each in aligned for finding in each.warnings)


def test_shares_of_equal_cost(store):
    tokens = []
    for loader in loaders(store, 4, steps={"step_samples": 83}):
        list(loader)
        tokens.append(loader.metrics()["rlbatch/loader_num_tokens/sum"])
    # 83 samples of at most 20 tokens: shares differ by less than one sample.
    assert max(tokens) - min(tokens) <= 20
    assert sum(tokens) == sum(map(len, SAMPLES))


def test_another_epoch_is_another_order_and_the_same_seed_the_same(store):
    (loader,) = loaders(store, 1, steps={"step_samples": 10, "seed": 7})
    first, second = names_in(list(loader)), names_in(list(loader))
    assert loader.epoch == 2
    assert first != second
    (again,) = loaders(store, 1, steps={"step_samples": 10, "seed": 7})
    again.set_epoch(1)
    assert names_in(list(again)) == second
    (other,) = loaders(store, 1, steps={"step_samples": 10, "seed": 8})
    assert names_in(list(other)) != first


def test_groups_come_whole_in_one_step(store):
    (loader,) = loaders(store, 1, steps={"step_samples": 9, "keep_groups": "step", "seed": 1})
    step_of: dict[str, set[int]] = {}
    for batch in loader:
        for ref in batch.refs:
            step_of.setdefault(ref.group_id, set()).add(batch.step.step)
    assert len(step_of) == 42
    assert all(len(steps) == 1 for steps in step_of.values())


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_groups_come_whole_in_one_batch(store, layout):
    ranks = loaders(store, 2, layout=layout, steps={"step_samples": 20, "keep_groups": "batch"})
    batches = [batch for loader in ranks for batch in loader]
    groups = [{ref.group_id for ref in batch.refs if ref.path} for batch in batches]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 42
    assert each_once(batches, SAMPLES)


def test_a_group_above_the_budget_is_named(tmp_path):
    store = write_store(tmp_path / "store", [numbered(0, length=20), numbered(1, length=20)])
    (loader,) = loaders(store, 1, max_tokens=30, steps={"keep_groups": "batch"})
    with pytest.raises(SoundnessError, match="40 tokens in the 2 samples of group 'g0'"):
        list(loader)


def test_interleaved_groups_are_gathered(tmp_path):
    samples = [numbered(number, group_id=f"g{number % 2}") for number in range(8)]
    store = write_store(tmp_path / "store", samples)
    (loader,) = loaders(store, 1, steps={"step_samples": 4, "keep_groups": "step"})
    groups = [{ref.group_id for ref in batch.refs} for batch in loader]
    assert groups == [{"g0"}, {"g1"}]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rank": 2, "num_ranks": 2}, "Steps.rank: expected less than num_ranks = 2"),
        ({"rank": -1}, "Steps.rank: expected at least 0"),
        ({"num_ranks": 0}, "Steps.num_ranks: expected at least 1"),
        ({"step_samples": 0}, "Steps.step_samples: expected at least 1"),
        ({"step_samples": 2.5}, "Steps.step_samples: expected int"),
        ({"seed": -1}, "Steps.seed: expected at least 0"),
        ({"keep_groups": "yes"}, "Steps.keep_groups: expected one of no, step, batch"),
        ({"follow_timeout_s": 0}, "Steps.follow_timeout_s: expected more than 0"),
        ({"follow_timeout_s": 1.0, "seed": 1}, "expected stored order"),
    ],
)
def test_steps_that_cannot_be_are_refused(change, text):
    with pytest.raises(RecordError, match=text):
        Steps(**change)


def test_context_parallel_padding_counts_in_the_budget(store):
    padding = Padding(sequence_multiple=8)
    for batch in RolloutLoader(store, layout="packed", max_tokens=64, padding=padding):
        lengths = batch.cu_seqlens.diff()
        assert (lengths % 8 == 0).all()
        assert batch.input_ids.numel() <= 64
    with pytest.raises(SoundnessError, match="at most max_tokens = 20 tokens, each padded to 8"):
        RolloutLoader(store, layout="packed", max_tokens=20, padding=padding)


def test_a_group_must_have_the_size_that_is_asked_for(tmp_path):
    store = write_store(tmp_path / "store", [numbered(0), numbered(1), numbered(2)])
    with pytest.raises(SoundnessError, match="group-incomplete"):
        list(RolloutLoader(store, layout="packed", max_tokens=64, checks=Checks(group_size=2)))
