"""Faulty samples are set aside with their findings and counted; the rest goes on as if they had not been."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from loader_cases import each_once, names_in, numbered, numbered_samples, write_store

from rlbatch.errors import RecordError, SoundnessError
from rlbatch.loader import Checks, Feed, RolloutLoader, Steps
from rlbatch.records import identical
from rlbatch.storage import open_reader, write_shard

GOOD = numbered_samples(30, seed=4)
NAN = float("nan")


def loader_of(store, aside, *, rank=0, num_ranks=1, keep_groups="no", max_tokens=64, **checks):
    return RolloutLoader(
        store,
        layout="packed",
        max_tokens=max_tokens,
        checks=Checks(on_fault="quarantine", quarantine=aside, **checks),
        steps=Steps(step_samples=10, rank=rank, num_ranks=num_ranks, keep_groups=keep_groups),
        feed=Feed(prefetch=0),
    )


@pytest.fixture
def spoilt(tmp_path):
    """Thirty good samples, and among them three that are not."""
    bad = [
        numbered(50, trajectory_id="nan", advantage=NAN),
        numbered(51, trajectory_id="long", length=70),
        numbered(52, trajectory_id="t3"),
    ]
    samples = [*GOOD[:4], bad[0], *GOOD[4:17], bad[1], *GOOD[17:], bad[2]]
    return write_store(tmp_path / "store", samples), bad


def test_the_rest_goes_on_and_what_is_set_aside_is_kept_with_its_findings(spoilt, tmp_path):
    store, bad = spoilt
    aside = tmp_path / "aside"
    batches = list(loader_of(store, aside))
    assert each_once(batches, GOOD)
    names = sorted(path.name for path in aside.iterdir())
    assert names == [
        f"000000-00000{step}.{kind}" for step in (0, 1, 3) for kind in ("findings.jsonl", "safetensors")
    ]
    kept = list(open_reader(aside))
    assert all(identical(a, b) for a, b in zip(kept, bad, strict=True))
    lines = [
        json.loads(line) for path in sorted(aside.glob("*.jsonl")) for line in path.read_text().splitlines()
    ]
    codes = [[found["code"] for found in line["findings"]] for line in lines]
    assert codes == [["advantage-not-finite"], ["sample-too-long"], ["duplicate-sample"]]
    assert [(line["path"][-18:], line["sample"]) for line in lines] == [
        ("000000.safetensors", 4),
        ("000001.safetensors", 8),
        ("000003.safetensors", 2),
    ]


def test_they_are_counted_and_told_in_the_metrics(spoilt, tmp_path):
    loader = loader_of(spoilt[0], tmp_path / "aside")
    list(loader)
    metrics = loader.metrics()
    assert metrics["rlbatch/loader_num_quarantined/sum"] == 3
    assert metrics["rlbatch/loader_findings/advantage-not-finite"] == 1
    assert metrics["rlbatch/loader_findings/duplicate-sample"] == 1
    assert metrics["rlbatch/loader_num_samples/sum"] == 30
    assert metrics["rlbatch/loader_num_tokens/sum"] == sum(map(len, GOOD))
    assert metrics["rlbatch/loader_num_loss_tokens/sum"] == sum(int(s.loss_mask.sum()) for s in GOOD)
    batches = metrics["rlbatch/loader_num_batches/sum"]
    assert metrics["rlbatch/loader_fill/mean"] == pytest.approx(sum(map(len, GOOD)) / (64 * batches))
    assert metrics["rlbatch/loader_wait_seconds/sum"] > 0


def test_without_quarantine_each_is_an_error(spoilt):
    store, _ = spoilt
    with pytest.raises(SoundnessError, match=r"\[sample-too-long\].*000001.safetensors sample 8"):
        RolloutLoader(store, layout="packed", max_tokens=64)
    with pytest.raises(SoundnessError) as caught:
        list(RolloutLoader(store, layout="packed", max_tokens=80))
    assert Counter(found.code for found in caught.value.findings) == {
        "advantage-not-finite": 1,
        "duplicate-sample": 1,
    }


def test_all_ranks_set_the_same_aside_and_one_of_them_writes(spoilt, tmp_path):
    store, _ = spoilt
    batches = [list(loader_of(store, tmp_path / f"{rank}", rank=rank, num_ranks=3)) for rank in range(3)]
    assert each_once([batch for own in batches for batch in own], GOOD)
    assert [(tmp_path / f"{rank}").exists() for rank in range(3)] == [True, False, False]
    assert len({tuple(batch.step.num_loss_tokens for batch in own) for own in batches}) == 1


def test_duplicates_are_found_across_shards_and_steps_and_the_first_is_kept(tmp_path):
    store = write_store(tmp_path / "store", [*GOOD, GOOD[0]])
    assert each_once(list(loader_of(store, tmp_path / "aside")), GOOD)
    with pytest.raises(SoundnessError, match=r"sample_id .* again, as in .*000000.safetensors sample 0"):
        list(RolloutLoader(store, layout="packed", max_tokens=64, steps=Steps(step_samples=5)))


def test_two_of_one_id_in_one_step_are_told_once(tmp_path):
    store = write_store(tmp_path / "store", [GOOD[0], GOOD[0]])
    with pytest.raises(SoundnessError) as caught:
        list(RolloutLoader(store, layout="packed", max_tokens=64))
    assert [found.code for found in caught.value.findings] == ["duplicate-sample"]


@pytest.mark.parametrize("options", [{"keep_groups": "step"}, {"group_size": 2}])
def test_a_group_goes_with_the_one_that_is_faulty(tmp_path, options):
    samples = [numbered(number, advantage=NAN if number == 5 else 0.5) for number in range(8)]
    store = write_store(tmp_path / "store", samples)
    batches = list(loader_of(store, tmp_path / "aside", **options))
    assert sorted(names_in(batches)) == ["t0", "t1", "t2", "t3", "t6", "t7"]
    assert [made.trajectory_id for made in open_reader(tmp_path / "aside")] == ["t4", "t5"]


def test_a_group_is_not_called_too_long_for_a_sample_that_is(tmp_path):
    # Together too long in any case: that is told of neither, as the one of 70 tokens says why.
    store = write_store(tmp_path / "store", [numbered(0), numbered(1, length=70), *GOOD[2:8]])
    loader = loader_of(store, tmp_path / "aside", keep_groups="batch")
    assert each_once(list(loader), GOOD[2:8])
    (path,) = (tmp_path / "aside").glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [[found["found"] for found in line["findings"]] for line in lines] == [["70 tokens"]] * 2


def test_an_incomplete_group_is_set_aside_whole(tmp_path):
    store = write_store(tmp_path / "store", [numbered(number) for number in range(5)])
    batches = list(loader_of(store, tmp_path / "aside", group_size=2))
    assert sorted(names_in(batches)) == ["t0", "t1", "t2", "t3"]


def test_a_step_of_nothing_but_faults_is_passed_over(tmp_path):
    bad = [numbered(number, advantage=NAN) for number in range(40, 50)]
    store = write_store(tmp_path / "store", [*GOOD[:10], *bad, *GOOD[10:]])
    loader = loader_of(store, tmp_path / "aside")
    batches = list(loader)
    assert each_once(batches, GOOD)
    assert {batch.step.step for batch in batches} == {0, 2, 3}
    assert loader.metrics()["rlbatch/loader_num_quarantined/sum"] == 10


def test_faults_of_the_last_step_are_counted_too(tmp_path):
    store = write_store(tmp_path / "store", [*GOOD, numbered(40, advantage=NAN)])
    loader = loader_of(store, tmp_path / "aside")
    assert each_once(list(loader), GOOD)
    assert loader.metrics()["rlbatch/loader_num_quarantined/sum"] == 1


def test_a_step_without_trained_tokens_is_an_error_and_set_aside_whole(tmp_path):
    silent = [replace(made, loss_mask=made.loss_mask & False) for made in GOOD[:10]]
    store = write_store(tmp_path / "store", [*silent, *GOOD[10:]])
    with pytest.raises(SoundnessError, match="nothing-trained"):
        list(RolloutLoader(store, layout="packed", max_tokens=64, steps=Steps(step_samples=10)))
    assert each_once(list(loader_of(store, tmp_path / "aside")), GOOD[10:])


def test_what_is_left_without_trained_tokens_is_set_aside_too(tmp_path):
    silent = [replace(made, loss_mask=made.loss_mask & False) for made in GOOD[1:3]]
    store = write_store(tmp_path / "store", [numbered(50, advantage=NAN), *silent])
    assert list(loader_of(store, tmp_path / "aside")) == []
    lines = (tmp_path / "aside" / "000000-000000.findings.jsonl").read_text().splitlines()
    codes = [[found["code"] for found in json.loads(line)["findings"]] for line in lines]
    assert codes == [["advantage-not-finite"], ["nothing-trained"], ["nothing-trained"]]


def test_an_audit_keeps_what_is_left_without_trained_tokens(tmp_path):
    silent = [replace(made, loss_mask=made.loss_mask & False) for made in GOOD[1:3]]
    store = write_store(tmp_path / "store", [numbered(50, length=70), *silent])
    batches = list(loader_of(store, tmp_path / "aside", purpose="audit"))
    assert each_once(batches, silent)


def siblings(first, second, trajectory_id):
    return [
        replace(made, trajectory_id=trajectory_id, sibling=at, num_siblings=2, group_id=None)
        for at, made in enumerate((first, second))
    ]


def test_a_trajectory_counts_where_its_first_sample_is_set_aside(tmp_path):
    pair = siblings(numbered(0, advantage=NAN), numbered(1), "both")
    (batch,) = loader_of(write_store(tmp_path / "store", pair), tmp_path / "aside")
    assert batch.step.num_trajectories == batch.step.num_samples == 1


def test_a_trajectory_counts_in_every_step_that_has_a_sample_of_it(tmp_path):
    pairs = [siblings(numbered(2 * at), numbered(2 * at + 1), f"t{at}") for at in range(8)]
    store = write_store(tmp_path / "store", [made for pair in pairs for made in pair])
    loader = RolloutLoader(store, layout="packed", max_tokens=64, steps=Steps(step_samples=2, seed=0))
    for batch in loader:
        assert batch.step.num_trajectories == len({ref.trajectory_id for ref in batch.refs})


def test_warnings_are_kept_and_counted(tmp_path):
    samples = [numbered(0), numbered(1, group_id=None)]
    loader = RolloutLoader(
        write_store(tmp_path / "store", samples), layout="packed", max_tokens=64, feed=Feed(prefetch=1)
    )
    assert loader.warnings == ()
    list(loader)
    assert [found.code for found in loader.warnings] == ["field-missing-in-some"]
    assert "000000.safetensors" in loader.warnings[0].where.path
    assert loader.metrics()["rlbatch/loader_findings/field-missing-in-some"] == 1
    assert loader.metrics()["rlbatch/loader_num_quarantined/sum"] == 0


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_store_without_advantages_is_audited_and_not_trained(tmp_path):
    samples = [numbered(0), numbered(1, advantage=None), numbered(2)]
    store = write_store(tmp_path / "store", samples)
    audited = RolloutLoader(store, layout="packed", max_tokens=64, checks=Checks(purpose="audit"))
    assert each_once(list(audited), samples)
    with pytest.raises(SoundnessError, match=r"set Trajectory\.advantage") as caught:
        list(RolloutLoader(store, layout="packed", max_tokens=64))
    assert [(found.code, found.where.sample) for found in caught.value.findings] == [
        ("advantage-not-finite", 1)
    ]


def test_a_second_pass_finds_its_quarantine_written_and_another_run_writes_beside_it(spoilt, tmp_path):
    store, _ = spoilt
    aside = tmp_path / "aside"
    list(loader_of(store, aside))
    before = contents(aside)
    list(loader_of(store, aside))
    assert contents(aside) == before
    bad = numbered(1, advantage=NAN)
    other = write_store(tmp_path / "other", [bad, numbered(2)])
    for _ in range(2):
        list(loader_of(other, aside))
        names = {f"000000-000000-1{suffix}" for suffix in (".findings.jsonl", ".safetensors")}
        assert contents(aside).keys() - before.keys() == names
    assert contents(aside).items() >= before.items()
    assert identical(open_reader(aside / "000000-000000-1.safetensors")[0], bad)


def test_the_same_samples_are_written_once_whatever_the_path_and_the_version(tmp_path, monkeypatch):
    samples = [numbered(at, version=0 if at == 3 else 4) for at in range(6)]
    store = write_store(tmp_path / "store", samples)
    aside = tmp_path / "aside"
    monkeypatch.chdir(tmp_path)
    seen = []
    for path, version in ((store, 5), (store, 6), ("store", 6)):
        loader = loader_of(path, aside, max_version_lag=3)
        loader.trainer_version = version
        assert each_once(list(loader), [*samples[:3], *samples[4:]])
        seen.append(contents(aside))
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 2


def test_findings_of_another_form_are_left_alone(spoilt, tmp_path):
    aside = tmp_path / "aside"
    aside.mkdir()
    (aside / "000000-000000.findings.jsonl").write_text("not ours\n")
    list(loader_of(spoilt[0], aside))
    assert (aside / "000000-000000.findings.jsonl").read_text() == "not ours\n"
    assert (aside / "000000-000000-1.safetensors").exists()


@pytest.mark.parametrize("aside", ["store", "store/aside", ".", "other/../store"])
def test_a_quarantine_in_the_store_or_round_it_is_refused(spoilt, tmp_path, aside):
    (tmp_path / "other").mkdir()
    with pytest.raises(RecordError, match=r"Checks\.quarantine: expected a directory apart from the store"):
        loader_of(spoilt[0], tmp_path / aside)


def test_a_kill_between_findings_and_shard_is_mended(spoilt, tmp_path):
    store, bad = spoilt
    aside = tmp_path / "aside"
    list(loader_of(store, aside))
    (aside / "000000-000000.safetensors").unlink()
    list(loader_of(store, aside))
    assert identical(open_reader(aside)[0], bad[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"on_fault": "quarantine"}, "expected a directory with on_fault='quarantine'"),
        ({"quarantine": "aside"}, "and none without"),
        ({"on_fault": "drop"}, "Checks.on_fault: expected one of error, quarantine"),
        ({"purpose": "eval"}, "Checks.purpose: expected one of"),
        ({"vocab_size": 0}, "Checks.vocab_size: expected at least 1"),
        ({"max_version_lag": -1}, "Checks.max_version_lag: expected at least 0"),
    ],
)
def test_checks_that_cannot_be_are_refused(change, text):
    with pytest.raises(RecordError, match=text):
        Checks(**change)


def test_a_feed_that_cannot_be_is_refused():
    with pytest.raises(RecordError, match=r"Feed\.prefetch: expected at least 0"):
        Feed(prefetch=-1)


def test_a_field_of_some_samples_only_is_kept_for_those(tmp_path):
    taught = replace(GOOD[0], teacher_logprobs=np.where(GOOD[0].loss_mask, np.float32(-0.5), np.float32(NAN)))
    store = tmp_path / "a.safetensors"
    write_shard(store, [taught, GOOD[1]])
    loader = RolloutLoader(store, layout="packed", max_tokens=64)
    (batch,) = loader
    given = (~batch.teacher_logprobs.isnan()).sum()
    assert given == GOOD[0].loss_mask.sum()
    assert "field-missing-in-some" in [found.code for found in loader.warnings]
