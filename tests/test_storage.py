"""Write, then read: the identity, for every sample that can be constructed; and who else reads the file."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from storage_cases import PROCESSED, RAW, plain_sample, varied_samples

import rlbatch.storage
from rlbatch.errors import StorageError
from rlbatch.records import FINISH_REASONS, TOKEN_FIELDS, Provenance, Sample, SamplingParams, identical
from rlbatch.storage import open_reader, write_shard

numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 5)
words = st.none() | st.text(max_size=8)

sampling = st.builds(
    SamplingParams,
    temperature=st.floats(1e-30, 1e6) | st.integers(0, 3),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 1 << 40),
    min_p=st.floats(0, 1) | st.integers(0, 1),
    repetition_penalty=st.floats(0, 1e6, exclude_min=True) | st.integers(1, 3),
    presence_penalty=numbers,
    logit_bias=st.booleans(),
    min_tokens=st.integers(0, 9),
)
provenance = st.builds(
    Provenance,
    engine=st.text(min_size=1, max_size=8),
    logprobs_mode=st.sampled_from(["processed", "raw", "unknown"]),
    sampling=sampling,
    engine_version=words,
    model=words,
    tokenizer_fingerprint=words,
    dtype=words,
    vocab_size=st.none() | st.integers(1, 1 << 40),
    eos_token_ids=st.lists(st.integers(0, 1 << 31), max_size=3).map(tuple),
    routing_shape=st.none() | st.tuples(st.integers(1, 99), st.integers(1, 99)),
)
# Every code point that UTF-8 can hold.
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


def bits(dtype: str, length: int) -> st.SearchStrategy[np.ndarray]:
    """[length] of any bits at all: every NaN, every infinity."""
    size = np.dtype(dtype).itemsize * length
    return st.binary(min_size=size, max_size=size).map(lambda raw: np.frombuffer(raw, dtype))


@st.composite
def samples(draw: st.DrawFn, known: list[Provenance]) -> Sample:
    length = draw(st.integers(1, 9))
    provenances = draw(st.lists(st.sampled_from(known), max_size=3))
    fields: dict[str, np.ndarray | None] = {}
    for spec in TOKEN_FIELDS:
        values = draw(bits("uint8" if spec.dtype == np.bool_ else spec.dtype.str, length))
        fields[spec.name] = values % 2 == 1 if spec.dtype == np.bool_ else values
        if spec.optional and draw(st.booleans()):
            fields[spec.name] = None
    turns = st.lists(st.integers(-1, len(provenances) - 1), min_size=length - 1, max_size=length - 1)
    fields["token_ids"] = fields["token_ids"] & 0x7FFFFFFF
    fields["turn"] = np.array([-1, *draw(turns)], np.int16)
    num_siblings = draw(st.integers(1, (1 << 63) - 1))
    return Sample(
        **fields,
        sample_id=draw(names),
        trajectory_id=draw(names),
        group_id=draw(st.none() | names),
        reward=draw(st.none() | st.floats(width=64)),
        sibling=draw(st.integers(0, num_siblings - 1)),
        num_siblings=num_siblings,
        provenances=tuple(provenances),
        finish_reasons=tuple(draw(st.lists(st.none() | st.sampled_from(FINISH_REASONS), max_size=3))),
        stop_reasons=tuple(draw(st.lists(st.none() | st.integers() | st.text(), max_size=3))),
    )


@st.composite
def shards(draw: st.DrawFn) -> list[Sample]:
    known = draw(st.lists(provenance, min_size=1, max_size=3))
    return draw(st.lists(samples(known), min_size=1, max_size=5))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(written=shards())
def test_what_is_read_is_identical_to_what_was_written(
    written: list[Sample], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("shard") / "a.safetensors"
    write_shard(path, written)
    reader = open_reader(path)
    assert [len(sample) for sample in written] == reader.lengths.tolist()
    for read in (list(reader), reader.samples(), [reader[index] for index in range(len(reader))]):
        assert len(read) == len(written)
        assert all(identical(a, b) for a, b in zip(read, written, strict=True))


def test_bits_of_nan_survive(tmp_path: Path) -> None:
    # Two quiet NaNs with payloads, one of them negative, and a signalling one.
    patterns = np.array([0x7FC00001, 0xFFC0BEEF, 0x7F800001], np.uint32)
    sample = dataclasses.replace(plain_sample(1, num_tokens=3), inference_logprobs=patterns.view(np.float32))
    write_shard(tmp_path / "a.safetensors", [sample])
    read = open_reader(tmp_path / "a.safetensors")[0]
    assert read.inference_logprobs.view(np.uint32).tolist() == patterns.tolist()


def test_values_that_are_absent_come_back_as_none_beside_samples_that_have_them(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", varied_samples())
    plain, two_turns, bare, foreign = open_reader(tmp_path / "a.safetensors").samples()
    assert plain.raw_inference_logprobs is None
    assert two_turns.raw_inference_logprobs is not None
    assert (bare.group_id, bare.reward, bare.finish_reasons) == (None, None, ())
    assert (foreign.group_id, foreign.reward, foreign.sample_id) == ("", -math.inf, "задача/四#🙂")
    assert (plain.teacher_logprobs, foreign.teacher_logprobs is None) == (None, False)
    assert two_turns.provenances == (PROCESSED, RAW)
    assert (plain.stop_reasons, two_turns.stop_reasons) == ((), ("</s>", 2))


def test_optional_field_that_no_sample_has_is_not_stored(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", [plain_sample(1), plain_sample(2)])
    names = safetensors.numpy.load_file(tmp_path / "a.safetensors").keys()
    assert not [spec.name for spec in TOKEN_FIELDS if spec.optional and spec.name in names]
    # Nor are stop reasons: the shard is one of an earlier release, and is read as one.
    assert not [name for name in names if name.startswith("stop_reasons")]
    assert [sample.stop_reasons for sample in open_reader(tmp_path / "a.safetensors").samples()] == [(), ()]


def test_provenances_that_are_equal_but_not_identical_stay_apart(tmp_path: Path) -> None:
    plus, minus = (
        dataclasses.replace(PROCESSED, sampling=SamplingParams(temperature=1.0, presence_penalty=zero))
        for zero in (0.0, -0.0)
    )
    written = [dataclasses.replace(plain_sample(1), provenances=(each,)) for each in (plus, minus, plus)]
    write_shard(tmp_path / "a.safetensors", written)
    reader = open_reader(tmp_path / "a.safetensors")
    signs = [math.copysign(1, sample.provenances[0].sampling.presence_penalty) for sample in reader]
    assert signs == [1, -1, 1]
    assert len(reader.provenances) == 2


def test_a_provenance_is_stored_once_for_all_samples_that_share_it(tmp_path: Path) -> None:
    equal = [dataclasses.replace(RAW) for _ in range(50)]
    copies = [dataclasses.replace(plain_sample(n), provenances=(each,)) for n, each in enumerate(equal)]
    write_shard(tmp_path / "a.safetensors", copies)
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        assert len(json.loads(file.metadata()["provenances"])) == 1


def test_header_does_not_grow_with_the_number_of_samples(tmp_path: Path) -> None:
    lengths = []
    for count in (10, 2000):
        path = tmp_path / f"{count}.safetensors"
        write_shard(path, [plain_sample(number) for number in range(count)])
        lengths.append(int.from_bytes(path.read_bytes()[:8], "little"))
    # Some more digits in shapes and offsets, nothing else.
    assert lengths[1] - lengths[0] < 200


def test_safetensors_library_reads_the_same_arrays(tmp_path: Path) -> None:
    written = varied_samples()
    write_shard(tmp_path / "a.safetensors", written)
    arrays = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert arrays["offsets"].tolist() == [0, 6, 11, 12, 15]
    for spec in TOKEN_FIELDS:
        parts = [getattr(sample, spec.name) for sample in written]
        absent = [np.full(len(sample), np.nan, np.float32) for sample in written]
        expected = np.concatenate([b if a is None else a for a, b in zip(parts, absent, strict=True)])
        assert arrays[spec.name].dtype == spec.dtype
        np.testing.assert_array_equal(arrays[spec.name], expected)
    assert arrays["teacher_logprobs.present"].tolist() == [False, False, False, True]
    assert arrays["sample_id"].tobytes().decode() == "task/3#0.0" + "task/1#0.0" + "2" + "задача/四#🙂"
    assert arrays["reward.present"].tolist() == [True, True, False, True]
    assert arrays["provenances.offsets"].tolist() == [0, 1, 3, 4, 5]
    assert arrays["provenances"].tolist() == [0, 0, 1, 0, 1]
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        metadata = file.metadata()
    assert (metadata["schema"], metadata["version"]) == ("rlbatch.samples", "1")
    assert json.loads(metadata["finish_reasons"]) == ["stop", "tool_calls", None]
    assert json.loads(metadata["stop_reasons"]) == ["</s>", 2]
    assert arrays["stop_reasons.offsets"].tolist() == [0, 0, 2, 2, 2]
    assert arrays["stop_reasons"].tolist() == [0, 1]


def test_every_array_is_aligned_to_its_itemsize(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", varied_samples())
    sample = open_reader(tmp_path / "a.safetensors")[0]
    for spec in TOKEN_FIELDS:
        values = getattr(sample, spec.name)
        assert values is None or values.flags.aligned


def test_what_is_not_a_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="expected: a Sample\n  found:    dict"):
        write_shard(tmp_path / "a.safetensors", [{"token_ids": [1]}])


def test_storage_imports_without_torch() -> None:
    code = "import sys, rlbatch.storage; sys.exit(str({'torch', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


def test_all_is_sorted_and_says_what_there_is() -> None:
    assert rlbatch.storage.__all__ == sorted(rlbatch.storage.__all__)
    assert all(hasattr(rlbatch.storage, name) for name in rlbatch.storage.__all__)
