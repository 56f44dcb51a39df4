"""Reading: what is mapped, what is verified when, and every way in which a file can be bad."""

import contextlib
import dataclasses
import json
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from storage_cases import PROCESSED, RAW, plain_sample, varied_samples

from rlbatch.errors import StorageError
from rlbatch.records import TOKEN_FIELDS, Sample, identical
from rlbatch.storage import columns, open_reader, write_shard
from rlbatch.storage.shard import Shard

WRITTEN = varied_samples()

NEWER_PROVENANCE = """
    [{"engine": "x", "logprobs_mode": "raw", "sampling": {"temperature": 1}, "quantisation": "fp8"}]
"""

Change = Callable[[dict[str, Any], dict[str, np.ndarray]], object]
"""Of a shard's metadata and arrays, in place."""


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "000000.safetensors"
    write_shard(path, WRITTEN)
    return path


def header_length(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def code_of(path: Path) -> str | None:
    """What a whole read says; None where it gives exactly what was written."""
    try:
        read = open_reader(path).samples()
    except StorageError as error:
        return error.code if str(path) in str(error) else f"{error.code}, of an unnamed file"
    assert len(read) == len(WRITTEN)
    assert all(identical(a, b) for a, b in zip(read, WRITTEN, strict=True))
    return None


def rewrite(path: Path, change: Change) -> None:
    """Change header and arrays, and make every checksum right again: a file written wrong, not altered.

    The checksums are computed here by what the format's docstring says, not by its code.
    """
    data = path.read_bytes()
    header = json.loads(data[8 : header_length(data)])
    stored = safetensors.numpy.load_file(path)
    arrays = {name: stored[name] for name in sorted(stored, key=lambda name: header[name]["data_offsets"])}
    metadata = header.pop("__metadata__")
    del metadata["header_crc32"]
    change(metadata, arrays)
    kinds = {"bool": "BOOL", "uint8": "U8", "int16": "I16", "int32": "I32", "int64": "I64", "float32": "F32"}
    kinds["float64"] = "F64"
    metadata["crc32"] = json.dumps(
        {name: f"{zlib.crc32(values.tobytes()):08x}" for name, values in arrays.items()}
    )
    header, at = {"__metadata__": metadata}, 0
    for name, values in arrays.items():
        span = [at, at + values.nbytes]
        header[name] = {"dtype": kinds[str(values.dtype)], "shape": list(values.shape), "data_offsets": span}
        at += values.nbytes
    put(path, header, b"".join(values.tobytes() for values in arrays.values()))


def put(path: Path, header: dict[str, Any], body: bytes) -> None:
    canonical = json.dumps(header, sort_keys=True, separators=(",", ":"))
    header["__metadata__"]["header_crc32"] = f"{zlib.crc32(canonical.encode()):08x}"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


# -- what is read --------------------------------------------------------------------------------------------


def test_random_access_gives_what_a_whole_read_gives(tmp_path: Path) -> None:
    for number in range(3):
        write_shard(
            tmp_path / f"{number}.safetensors", [plain_sample(10 * number + n) for n in range(number + 1)]
        )
    reader = open_reader(tmp_path)
    assert len(reader) == 6
    whole = reader.samples()
    for index in range(-6, 6):
        assert identical(reader[index], whole[index])
    assert identical(reader[np.int64(4)], whole[4])
    assert [sample.sample_id for sample in reader.read([5, 0, 3, 3])] == [
        "task/22#0.0",
        "task/0#0.0",
        "task/20#0.0",
        "task/20#0.0",
    ]
    for index in (6, -7):
        with pytest.raises(IndexError, match=f"sample {index} of 6"):
            reader[index]
    with pytest.raises(TypeError, match=r"found a slice; read\(range\(4, 6, 1\)\) reads it"):
        reader[-2:]


def test_directory_is_read_in_the_order_of_names_and_no_deeper(tmp_path: Path) -> None:
    for name in ("b", "c", "a"):
        write_shard(tmp_path / f"{name}.safetensors", [plain_sample(ord(name)), plain_sample(0)])
    (tmp_path / "below").mkdir()
    write_shard(tmp_path / "below" / "d.safetensors", [plain_sample(9)])
    (tmp_path / "notes.txt").write_text("not a shard")
    reader = open_reader(str(tmp_path))
    paths = tuple(str(tmp_path / f"{name}.safetensors") for name in "abc")
    assert reader.paths == paths
    assert [reader.location(index) for index in range(6)] == [(path, at) for path in paths for at in (0, 1)]
    assert [sample.sample_id for sample in reader][::2] == ["task/97#0.0", "task/98#0.0", "task/99#0.0"]


def test_provenances_of_several_shards_are_named_once(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", [WRITTEN[0]])
    write_shard(tmp_path / "b.safetensors", WRITTEN)
    assert open_reader(tmp_path).provenances == (PROCESSED, RAW)


def test_tokens_are_read_only_views_of_the_mapped_file(shard: Path) -> None:
    reader = open_reader(shard)
    first, again = reader[1], reader.samples()[1]
    for spec in TOKEN_FIELDS:
        values = getattr(first, spec.name)
        if values is None:
            continue
        assert np.shares_memory(values, getattr(again, spec.name))
        assert not values.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            values.base.flags.writeable = True
        while not isinstance(values, np.memmap):
            values = values.base
        assert Path(values.filename) == shard
        assert values.mode == "r"


def test_lengths_are_int64_and_read_only(shard: Path) -> None:
    lengths = open_reader(shard).lengths
    assert (lengths.dtype, lengths.tolist()) == (np.int64, [6, 5, 1, 3])
    with pytest.raises(ValueError, match="read-only"):
        lengths[0] = 7


def test_reader_pickles_as_its_paths(tmp_path: Path, shard: Path) -> None:
    (tmp_path / ".000001.safetensors.tmp-99-0123abcd").write_bytes(b"half")
    reader = open_reader(tmp_path)
    data = pickle.dumps(reader)
    write_shard(tmp_path / "later.safetensors", [plain_sample(1)])
    again = pickle.loads(data)
    assert len(data) < 1000
    assert (again.paths, again.leftovers) == (reader.paths, reader.leftovers)
    assert all(identical(a, b) for a, b in zip(again, WRITTEN, strict=True))


# -- leftovers -----------------------------------------------------------------------------------------------


def test_leftovers_of_killed_writers_are_listed_and_ignored(tmp_path: Path, shard: Path) -> None:
    leftover = tmp_path / ".000001.safetensors.tmp-4711-0123abcd"
    leftover.write_bytes(shard.read_bytes()[:500])
    (tmp_path / ".hidden").write_text("no leftover")
    reader = open_reader(tmp_path)
    assert reader.leftovers == (str(leftover),)
    assert reader.paths == (str(shard),)
    assert len(reader.samples()) == len(WRITTEN)


def test_directory_of_leftovers_only_is_refused_and_says_so(tmp_path: Path) -> None:
    (tmp_path / ".000000.safetensors.tmp-4711-0123abcd").write_bytes(b"half")
    with pytest.raises(StorageError, match="1 entries, none of that name; 1 are temporary") as caught:
        open_reader(tmp_path)
    assert caught.value.code == "file-unusable"


# -- what no shard is ----------------------------------------------------------------------------------------


def test_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="an empty directory") as caught:
        open_reader(tmp_path)
    assert caught.value.code == "file-unusable"


def test_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file or directory") as caught:
        open_reader(tmp_path / "nowhere")
    assert caught.value.code == "file-unusable"


def test_directory_with_the_name_of_a_shard_is_refused(tmp_path: Path, shard: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(StorageError, match=r"x\.safetensors") as caught:
        open_reader(tmp_path)
    assert caught.value.code == "file-unusable"


def test_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError) as caught:
        open_reader(tmp_path / "pipe")
    assert caught.value.code == "file-unusable"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"choices": []}\n',
        b"PK\x03\x04" + bytes(100),
        (1 << 40).to_bytes(8, "little") + b"{}",
        (3).to_bytes(8, "little") + b"{]}",
        (4).to_bytes(8, "little") + b"{} x",
        (13).to_bytes(8, "little") + b'{"a":1,"a":2}',
        (200_005).to_bytes(8, "little") + b'{"a":' + b"[" * 200_000,
        (8).to_bytes(8, "little") + b'{"\xff": 1}',
    ],
    ids=[
        "empty",
        "json",
        "zip",
        "huge-header",
        "not-json",
        "more-than-json",
        "key-twice",
        "deep",
        "not-utf8",
    ],
)
def test_file_that_is_no_safetensors_file_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    assert code_of(path) == "file-unusable"


def test_path_that_the_system_refuses_is_an_error_of_ours(tmp_path: Path, shard: Path) -> None:
    for path in (tmp_path / ("x" * 300), shard / "below"):
        with pytest.raises(StorageError) as caught:
            open_reader(path)
        assert caught.value.code == "file-unusable"


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"schema": "other.records", "version": "1"}])
def test_other_safetensors_file_among_shards_is_named(
    metadata: dict[str, str] | None, tmp_path: Path, shard: Path
) -> None:
    safetensors.numpy.save_file(
        {"w": np.zeros((2, 3), np.float16)}, tmp_path / "model.safetensors", metadata=metadata
    )
    with pytest.raises(StorageError, match=r"model\.safetensors") as caught:
        open_reader(tmp_path)
    assert caught.value.code == "schema-unknown"


def test_unknown_version_is_refused_and_names_both(shard: Path) -> None:
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b'"version": "1"', b'"version": "2"', 1))
    with pytest.raises(StorageError) as caught:
        open_reader(shard)
    assert caught.value.code == "schema-unknown"
    assert "version '1'" in caught.value.findings[0].expected
    assert "version '2'" in caught.value.findings[0].found


# -- damage --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def altered_byte(path: Path, at: int, value: int) -> Iterator[None]:
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        before = file.read(1)
        file.seek(at)
        file.write(bytes([value]))
        yield
        file.seek(at)
        file.write(before)


def test_every_altered_byte_of_the_body_is_caught(shard: Path) -> None:
    data = shard.read_bytes()
    for at in range(header_length(data), len(data)):
        with altered_byte(shard, at, data[at] ^ 1 << at % 8):
            assert code_of(shard) == "shard-altered", at


def test_every_altered_byte_of_the_header_is_refused_or_says_the_same(shard: Path) -> None:
    data = shard.read_bytes()
    codes = set()
    for at in range(header_length(data)):
        with altered_byte(shard, at, data[at] ^ 1 << at % 7):
            code = code_of(shard)
        # Harmless is only a space that became another kind of white space.
        assert code is not None or data[at] == ord(" "), at
        codes.add(code)
    assert code_of(shard) is None
    assert codes <= {None, "shard-altered", "shard-truncated", "schema-unknown", "file-unusable"}
    assert "shard-altered" in codes


def test_shard_cut_at_any_length_is_refused(shard: Path) -> None:
    for length in reversed(range(shard.stat().st_size)):
        os.truncate(shard, length)
        # Below nine bytes nothing tells it from any other file.
        assert code_of(shard) == ("shard-truncated" if length > 8 else "file-unusable"), length


def test_shard_with_bytes_behind_it_is_refused(shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(b"\0")
    assert code_of(shard) == "shard-truncated"


def flip_last_token_array(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    header = json.loads(data[8 : header_length(data)])
    start, _ = header["token_ids"]["data_offsets"]
    data[header_length(data) + start] ^= 1
    shard.write_bytes(data)


def test_random_access_does_not_look_at_checksums_and_whole_reads_do(shard: Path) -> None:
    flip_last_token_array(shard)
    reader = open_reader(shard)
    assert reader[0].token_ids[0] == WRITTEN[0].token_ids[0] ^ 1
    for read in (reader.samples, reader.verify, lambda: next(iter(reader)), lambda: reader.read([3])):
        with pytest.raises(StorageError, match="array 'token_ids'") as caught:
            read()
        assert caught.value.code == "shard-altered"


def test_read_verifies_only_the_shards_that_it_touches(tmp_path: Path, shard: Path) -> None:
    write_shard(tmp_path / "good.safetensors", [plain_sample(1)])
    flip_last_token_array(shard)
    reader = open_reader(tmp_path)
    assert [sample.sample_id for sample in reader.read([4])] == ["task/1#0.0"]
    with pytest.raises(StorageError, match=r"000000\.safetensors"):
        reader.read([4, 0])


def set_array(name: str, at: int, value: int) -> Change:
    def change(_: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        arrays[name] = arrays[name].copy()
        arrays[name][at] = value

    return change


def drop(name: str) -> Change:
    return lambda _, arrays: arrays.pop(name)


def replace(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(_: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        arrays[name] = make(arrays[name])

    return change


def document(name: str, text: str | None) -> Change:
    def change(metadata: dict[str, Any], _: dict[str, np.ndarray]) -> None:
        metadata.pop(name)
        if text is not None:
            metadata[name] = text

    return change


def test_rewriting_without_a_change_is_harmless(shard: Path) -> None:
    # Else the cases below would prove nothing.
    rewrite(shard, lambda *_: None)
    assert code_of(shard) is None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (set_array("offsets", 0, 1), "shard-altered"),
        (set_array("offsets", 2, 5), "shard-altered"),
        (set_array("offsets", 2, 6), "shard-altered"),
        (set_array("offsets", -1, 14), "shard-altered"),
        (set_array("offsets", -1, 1 << 62), "shard-altered"),
        (set_array("offsets", 1, -(1 << 62)), "shard-altered"),
        (replace("offsets", lambda _: np.zeros(0, np.int64)), "shard-altered"),
        (replace("offsets", lambda _: np.zeros(1, np.int64)), "shard-altered"),
        (set_array("sample_id.offsets", 1, 1000), "shard-altered"),
        (set_array("sample_id", 0, 0xFF), "shard-altered"),
        (set_array("provenances", 0, 2), "shard-altered"),
        (set_array("provenances", 0, -1), "shard-altered"),
        (set_array("finish_reasons", 0, 99), "shard-altered"),
        (set_array("token_ids", 3, -1), "shard-altered"),
        (set_array("turn", 3, 9), "shard-altered"),
        (set_array("num_siblings", 1, 1), "shard-altered"),
        (replace("turn", lambda turn: turn[:-1]), "shard-altered"),
        (replace("turn", lambda turn: turn.astype(np.int32)), "shard-altered"),
        (replace("turn", lambda turn: turn[None]), "shard-altered"),
        (replace("reward", lambda reward: reward[:-1]), "shard-altered"),
        (drop("loss_mask"), "shard-altered"),
        (drop("reward.present"), "shard-altered"),
        (drop("teacher_logprobs"), "shard-altered"),
        (drop("teacher_logprobs.present"), "shard-altered"),
        (lambda _, arrays: arrays.update(routing=np.zeros(3, np.float32)), "schema-unknown"),
        (document("provenances", None), "schema-unknown"),
        (document("provenances", "{"), "schema-unknown"),
        (document("provenances", "[" * 100_000), "schema-unknown"),
        (document("provenances", '[{"engine": "vllm", "logprobs_mode": "raw"}]'), "schema-unknown"),
        (document("provenances", NEWER_PROVENANCE), "schema-unknown"),
        (document("finish_reasons", '["stop", 3]'), "schema-unknown"),
        (document("finish_reasons", '"stop"'), "schema-unknown"),
        (document("stop_reasons", "[true]"), "schema-unknown"),
        (document("stop_reasons", None), "shard-altered"),
        (set_array("stop_reasons", 0, 99), "shard-altered"),
        (drop("stop_reasons.offsets"), "shard-altered"),
    ],
)
def test_shard_that_was_written_wrong_is_refused(change: Change, code: str, shard: Path) -> None:
    rewrite(shard, change)
    assert code_of(shard) == code


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("turn", "data_offsets", [0, 30]),
        ("turn", "data_offsets", [-30, 0]),
        ("turn", "data_offsets", [0.0, 30.0]),
        ("turn", "data_offsets", [1 << 70, (1 << 70) + 30]),
        ("turn", "data_offsets", "0:30"),
        ("turn", "shape", [14]),
        ("turn", "shape", []),
        ("turn", "shape", [True]),
        ("turn", "dtype", "BF16"),
        ("turn", "dtype", ["I16"]),
        ("turn", "dtype", None),
    ],
)
def test_header_whose_arrays_overlap_or_make_no_sense_is_refused(
    name: str, key: str, value: object, shard: Path
) -> None:
    data = shard.read_bytes()
    header = json.loads(data[8 : header_length(data)])
    del header["__metadata__"]["header_crc32"]
    header[name][key] = value
    put(shard, header, data[header_length(data) :])
    assert code_of(shard) == "shard-altered"


def test_header_that_leaves_a_gap_is_refused(shard: Path) -> None:
    data = shard.read_bytes()
    header = json.loads(data[8 : header_length(data)])
    del header["__metadata__"]["header_crc32"]
    last = max(
        (name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"]
    )
    header[last]["data_offsets"] = [offset + 8 for offset in header[last]["data_offsets"]]
    put(shard, header, data[header_length(data) :] + bytes(8))
    assert code_of(shard) == "shard-altered"


@pytest.mark.parametrize("crc32", [None, "{}", "[]", '{"turn": "xyz"}'])
def test_shard_without_a_checksum_for_each_array_is_refused(crc32: str | None, shard: Path) -> None:
    data = shard.read_bytes()
    header = json.loads(data[8 : header_length(data)])
    del header["__metadata__"]["header_crc32"], header["__metadata__"]["crc32"]
    if crc32 is not None:
        header["__metadata__"]["crc32"] = crc32
    put(shard, header, data[header_length(data) :])
    assert code_of(shard) == "shard-altered"


@pytest.mark.parametrize("samples", [varied_samples(), [plain_sample(number) for number in range(5)]])
def test_samples_made_at_once_are_those_made_one_by_one(tmp_path: Path, samples: list[Sample]) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, samples)
    unverified, verified = open_reader(path), open_reader(path).samples()
    for index, (written, made) in enumerate(zip(samples, verified, strict=True)):
        # `identical` looks at every field, those that are derived as well.
        assert identical(unverified[index], written)
        assert identical(made, written)


@pytest.mark.parametrize(
    ("name", "spoil", "text"),
    [
        ("token_ids", lambda values: values.__setitem__(0, -5), "expected ids >= 0"),
        ("turn", lambda values: values.__setitem__(0, 0), "token 0 to be of a prompt"),
        ("turn", lambda values: values.__setitem__(4, 7), "expected turns -1 to 0"),
        ("turn", lambda values: values.__setitem__(4, -2), "expected turns -1 to 0"),
        ("sibling", lambda values: values.__setitem__(0, 1), "0 <= sibling < num_siblings"),
        ("sample_id", lambda values: values.__setitem__(0, 0xFF), "decode"),
    ],
)
def test_a_sealed_shard_of_what_cannot_be_a_sample_is_told_by_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, spoil: Any, text: str
) -> None:
    def encode(samples: list[Sample]) -> columns.Encoded:
        encoded = columns.encode(samples)
        arrays = []
        for each, values in encoded.arrays:
            values = values.copy()
            if each == name:
                spoil(values)
            arrays.append((each, values))
        return dataclasses.replace(encoded, arrays=tuple(arrays))

    monkeypatch.setattr("rlbatch.storage.writer.encode", encode)
    write_shard(tmp_path / "a.safetensors", [plain_sample(1), plain_sample(2)])
    with pytest.raises(StorageError, match="shard-altered") as caught:
        open_reader(tmp_path / "a.safetensors").read([1, 0])
    assert text in str(caught.value)
    assert caught.value.findings[0].where.sample == 0


def test_copied_samples_are_the_same_and_lie_end_to_end_in_memory_of_their_own(tmp_path: Path) -> None:
    for number, part in enumerate((WRITTEN[:3], WRITTEN[3:])):
        write_shard(tmp_path / f"{number}.safetensors", part)
    reader = open_reader(tmp_path)
    views, copies = reader.read([3, -1, 0, 2]), reader.read_copies([3, -1, 0, 2])
    (stretch,) = copies.stretches
    for view, copy, start in zip(views, copies, stretch.offsets.tolist(), strict=False):
        assert identical(view, copy)
        for name, values in stretch.columns.items():
            own = getattr(copy, name)
            assert not own.flags.writeable
            assert not values.flags.writeable
            assert np.shares_memory(own, values[start : start + len(copy)])
            assert not np.shares_memory(own, getattr(view, name))


@pytest.mark.parametrize(("noticed", "found"), [(True, "written since"), (False, "a shorter file")])
def test_a_shard_that_was_cut_short_is_not_copied_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: bool, found: str
) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, WRITTEN)
    reader = open_reader(path)
    reader.verify()
    logprobs = np.concatenate([each.inference_logprobs for each in WRITTEN]).tobytes()
    os.truncate(path, path.read_bytes().index(logprobs))
    if not noticed:
        # Cut short between the look at the file and the reading of it.
        monkeypatch.setattr(Shard, "_require_same", lambda *_: None)
    with pytest.raises(StorageError, match="store-changed") as caught:
        reader.read_copies([0, 1])
    assert found in str(caught.value)


@pytest.mark.parametrize(("behind", "num_chosen"), [("_require_same", 0), ("chosen", 1)])
def test_bytes_that_are_written_while_they_are_copied_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: str, num_chosen: int
) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, WRITTEN)
    reader = open_reader(path)
    reader.verify()
    calls = []

    def then_written(name: str) -> Callable[..., Any]:
        method = getattr(Shard, name)

        def noted(*args: Any) -> Any:
            result = method(*args)
            calls.append(name)
            if name == behind:
                with path.open("r+b") as file:
                    file.seek(-4, os.SEEK_END)
                    file.write(b"\xff" * 4)
                # The clock of files may not have moved on since the shard was written.
                os.utime(path, ns=(1, 1))
            return result

        return noted

    for name in ("_require_same", "chosen"):
        monkeypatch.setattr(Shard, name, then_written(name))
    with pytest.raises(StorageError, match=r"\[store-changed\][\s\S]*written since"):
        reader.read_copies([0, 1])
    assert calls.count("chosen") == num_chosen


def test_copies_of_a_shard_that_is_gone_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, WRITTEN)
    reader = open_reader(path)
    reader.verify()
    path.unlink()
    with pytest.raises(StorageError, match="store-changed"):
        reader.read_copies([0])
