"""Stored samples in, checked batches out: each sample once, in order, within the budget, or an error."""

import pytest
import torch
from builders import provenance, recorded_provenance, recorded_samples, sample
from safetensors import safe_open
from torch.utils.data import DataLoader

from rlbatch.collate import collate
from rlbatch.errors import SoundnessError, StorageError
from rlbatch.loader import Checks, RolloutLoader, Steps
from rlbatch.storage import open_reader, open_writer, write_shard


@pytest.fixture
def store(tmp_path, data_dir):
    path = data_dir / "rollouts" / "fp32_raw__t1.json"
    samples = recorded_samples(path, recorded_provenance(path))
    with open_writer(tmp_path / "store", max_samples=10) as writer:
        for made in samples:
            writer.append(made)
    return tmp_path / "store", samples


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_every_sample_comes_once_within_the_budget(store, layout):
    path, samples = store
    loader = RolloutLoader(path, layout=layout, max_tokens=200)
    batches = list(loader)
    assert len(batches) > 3
    assert loader.num_steps == 1
    assert all(batch.input_ids.numel() <= 200 for batch in batches)
    names = [ref.trajectory_id for batch in batches for ref in batch.refs]
    assert sorted(names) == sorted(s.trajectory_id for s in samples)
    trained = torch.cat([batch.target_ids[batch.loss_mask] for batch in batches]).tolist()
    of_name = {s.trajectory_id: s.token_ids[s.loss_mask].tolist() for s in samples}
    assert trained == [token for name in names for token in of_name[name]]
    assert sum(batch.num_loss_tokens for batch in batches) == len(trained)


def test_places_are_shard_and_index(store):
    path, _ = store
    batches = RolloutLoader(path, layout="packed", max_tokens=500)
    refs = sorted((ref for batch in batches for ref in batch.refs), key=lambda ref: (ref.path, ref.index))
    reader = open_reader(path)
    assert [(ref.path, ref.index) for ref in refs] == [reader.location(i) for i in range(len(reader))]


def test_a_second_pass_gives_the_same(store):
    loader = RolloutLoader(store[0], layout="packed", max_tokens=500)
    first, second = ([batch.input_ids for batch in loader] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_plain_data_loader_over_the_reader_works_too(store):
    path, samples = store
    loader = DataLoader(
        open_reader(path), batch_size=8, collate_fn=lambda part: collate(part, layout="packed")
    )
    assert sum(batch.num_loss_tokens for batch in loader) == sum(int(s.loss_mask.sum()) for s in samples)


def test_a_sample_above_the_budget_is_named_and_never_cut(store):
    with pytest.raises(SoundnessError, match=r"\[sample-too-long\].*000000.safetensors sample 0") as caught:
        RolloutLoader(store[0], layout="padded", max_tokens=40)
    assert all(found.code == "sample-too-long" for found in caught.value.findings)


def test_a_fault_stops_before_its_step_and_names_the_place(tmp_path):
    good = [sample([1, 5], [7, 2], [-0.1, -0.2], trajectory_id=f"t{i}") for i in range(3)]
    bad = sample([1, 5], [7, 2], [-0.1, 3.0], trajectory_id="bad")
    write_shard(tmp_path / "a.safetensors", [*good, bad])
    loader = RolloutLoader(tmp_path, layout="packed", max_tokens=8, steps=Steps(step_samples=2))
    batches = iter(loader)
    assert next(batches).num_loss_tokens == 4
    with pytest.raises(SoundnessError, match=r"a.safetensors sample 3, trajectory 'bad', turn 0, tokens 3:4"):
        next(batches)


def test_ids_are_held_against_the_vocabulary(store):
    with pytest.raises(SoundnessError, match="token-out-of-range"):
        next(iter(RolloutLoader(store[0], layout="packed", max_tokens=500, checks=Checks(vocab_size=300))))


def test_raw_and_processed_turns_do_not_share_a_batch(tmp_path):
    raw = provenance(logprobs_mode="raw")
    samples = [
        sample([1], [7], [-1.0], trajectory_id=f"t{i}", provenance=how)
        for i, how in enumerate([raw, provenance()])
    ]
    write_shard(tmp_path / "a.safetensors", samples)
    batches = list(RolloutLoader(tmp_path / "a.safetensors", layout="packed", max_tokens=100))
    assert sorted(batch.provenances[0].logprobs_mode for batch in batches) == ["processed", "raw"]


def test_an_altered_shard_is_refused_when_its_samples_are_read(tmp_path):
    path = tmp_path / "a.safetensors"
    write_shard(path, [sample([1, 5], [7, 2], [-0.1, -0.2])])
    with safe_open(path, framework="numpy") as file:
        values = file.get_tensor("inference_logprobs").tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(values)] ^= 1
    path.write_bytes(content)
    loader = RolloutLoader(path, layout="packed", max_tokens=8)
    with pytest.raises(StorageError, match="shard-altered"):
        next(iter(loader))
