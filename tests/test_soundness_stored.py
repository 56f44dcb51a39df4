"""What is said of samples does not depend on whether they lie end to end in a shard or each for itself."""

from dataclasses import replace

import numpy as np
import pytest
from builders import provenance, sample

from rlbatch.catalogue import CATALOGUE
from rlbatch.faults import FAULTS, ROUTING_FAULTS, SET_FAULTS, TRAINER_VERSION
from rlbatch.records import Origin, StoredSamples
from rlbatch.soundness import check_sound, gate, subject
from rlbatch.storage import derived, open_reader, open_writer

TOLD = {"vocab_size": 1000, "trainer_version": TRAINER_VERSION, "max_version_lag": 4, "group_size": 4}
WITHOUT_TRAINER = {
    **{f"sample:{code}": fault for code, fault in FAULTS.items() if CATALOGUE[code].level == "sound"},
    **{f"set:{code}": fault for code, fault in SET_FAULTS.items() if CATALOGUE[code].level == "sound"},
    **{f"routing:{code}": fault for code, fault in ROUTING_FAULTS.items()},
}


def made(name, rng, *, experts):
    ids, values = rng.integers(10, 90, 40), -rng.exponential(1.0, 40)
    changes = {}
    if experts:
        layers = [[rng.permutation(8)[:2] for _ in range(3)] for _ in range(41)]
        changes["routed_experts"] = np.array(layers, np.uint8)
    # The stop token ends the turn.
    ids[-1] = 2
    how = provenance(bos_token_id=1, eos_token_ids=(2, 4))
    one = sample([1, 5], ids.tolist(), values.tolist(), trajectory_id=name, group_id=name[0], **changes)
    versions = np.where(one.turn >= 0, TRAINER_VERSION - 4, -1).astype(np.int32)
    return replace(one, provenances=(how,), finish_reasons=("stop",), policy_version=versions)


def clean(*, experts=False):
    rng = np.random.default_rng(0)
    return [made(f"{group}{index}", rng, experts=experts) for group in "abc" for index in range(4)]


def stored(samples, path):
    with open_writer(path) as writer:
        for each in samples:
            writer.append(each)
    reader = open_reader(path)
    return reader.read(range(len(reader)))


@pytest.fixture
def small_parts(monkeypatch):
    """Every stretch is taken as it lies, and parts end within the list."""
    monkeypatch.setattr(subject, "MIN_FLAT_TOKENS", 1)
    monkeypatch.setattr(gate, "PART_TOKENS", 100)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name", WITHOUT_TRAINER)
def test_findings_on_a_shard_are_those_on_the_same_samples_one_by_one(name, tmp_path):
    sound = clean(experts=name.startswith("routing:"))
    planted = WITHOUT_TRAINER[name].plant(sound, np.random.default_rng(1))
    origins = [Origin(path="a.safetensors", index=index) for index in range(len(planted))]
    read = stored(planted, tmp_path / "a.safetensors")
    assert isinstance(read, StoredSamples)
    found = check_sound(read, purpose="train", origins=origins, **TOLD)
    assert found == check_sound(planted, purpose="train", origins=origins, **TOLD)
    # Two empty answers would be equal too.
    assert found


@pytest.mark.usefixtures("small_parts")
def test_clean_samples_of_a_shard_are_sound(tmp_path):
    read = stored(clean(), tmp_path / "a.safetensors")
    assert check_sound(read, purpose="train", **TOLD) == ()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("order", [[5, 6, 7, 0, 1], [3], [11, 2, 3, 9], [0, 2, 4, 6]])
def test_places_are_right_whatever_was_read(order, tmp_path):
    samples = clean()
    ids = samples[3].token_ids.copy()
    ids[2:41] = 5000
    samples[3] = replace(samples[3], token_ids=ids)
    samples[6] = replace(samples[6], loss_mask=np.ones(42, bool))
    stored(samples, tmp_path / "a.safetensors")
    read = open_reader(tmp_path / "a.safetensors").read(order)
    told = {(found.code, found.where.sample) for found in check_sound(read, purpose="train", vocab_size=1000)}
    expected = {("token-out-of-range", order.index(3))} if 3 in order else set()
    assert told - {("mask-without-logprob", order.index(6) if 6 in order else None)} == expected
    assert ("mask-without-logprob" in {code for code, _ in told}) == (6 in order)


def test_samples_of_a_shard_are_not_joined(tmp_path):
    read = stored(clean(), tmp_path / "a.safetensors")
    (stretch,) = read.stretches
    assert stretch.num_tokens == 12 * 42
    assert stretch.offsets.tolist() == [42 * index for index in range(13)]
    assert np.shares_memory(stretch.columns["token_ids"], read[7].token_ids)
    part = stretch.part(2, 5)
    assert part.offsets.tolist() == [0, 42, 84, 126]
    assert part.columns["token_ids"][42:84].tolist() == read[3].token_ids.tolist()


def test_runs_of_what_was_read_are_the_stretches(tmp_path):
    stored(clean(), tmp_path / "a.safetensors")
    read = open_reader(tmp_path / "a.safetensors").read([4, 5, 6, 1, 0, 9])
    assert [len(stretch.samples) for stretch in read.stretches] == [3, 1, 1, 1]
    assert [each.sample_id for each in read] == ["b0:0", "b1:0", "b2:0", "a1:0", "a0:0", "c1:0"]
    assert open_reader(tmp_path / "a.safetensors").read([]).stretches == ()


@pytest.mark.parametrize("piece", [1, 7, 42, 10_000])
def test_runs_of_a_shard_are_those_of_its_samples_wherever_it_is_cut(piece, tmp_path, monkeypatch):
    monkeypatch.setattr(derived, "PIECE", piece)
    samples = clean()
    samples[2] = replace(samples[2], policy_version=np.arange(42, dtype=np.int32))
    for read, own in zip(stored(samples, tmp_path / "a.safetensors"), samples, strict=True):
        assert read.segments == own.segments
        assert read.segment_versions == own.segment_versions
        assert read.num_loss_tokens == own.num_loss_tokens
