"""A store that lacks shards, or has others, than its writer wrote is refused; one that never ended is not."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from storage_cases import plain_sample

from rlbatch.errors import StorageError
from rlbatch.loader import RolloutLoader
from rlbatch.storage import open_reader, open_writer, write_shard
from rlbatch.storage.files import END_NAME, list_directory
from rlbatch.storage.sources import files_of, read_rows
from rlbatch.storage.statements import Statement

NUM_SAMPLES = 23


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Shards 000000 to 000002, of 10, 10 and 3 samples."""
    with open_writer(tmp_path / "store", max_samples=10) as writer:
        for number in range(NUM_SAMPLES):
            writer.append(plain_sample(number))
    return tmp_path / "store"


def shard(directory: Path, number: int) -> Path:
    return directory / f"00000{number}.safetensors"


def remove(number: int) -> Callable[[Path], object]:
    return lambda store: shard(store, number).unlink()


def remove_all(store: Path) -> None:
    for number in range(3):
        shard(store, number).unlink()


def add(name: str) -> Callable[[Path], object]:
    return lambda store: write_shard(store / f"{name}.safetensors", [plain_sample(99)])


def exchange(store: Path) -> None:
    shard(store, 1).unlink()
    write_shard(shard(store, 1), [plain_sample(99)])


def refused(path: Path) -> StorageError:
    """What reader, loader and the stream of rows all say of it."""
    (file,) = files_of(path)
    reads: tuple[Callable[[], object], ...] = (
        lambda: open_reader(path),
        lambda: RolloutLoader(path, layout="packed", max_tokens=64),
        lambda: list(read_rows(file, Statement())),
    )
    errors = []
    for read in reads:
        with pytest.raises(StorageError) as caught:
            read()
        errors.append(caught.value)
    assert len({str(error) for error in errors}) == 1
    return errors[0]


def test_a_whole_store_is_read(store: Path) -> None:
    assert len(open_reader(store)) == NUM_SAMPLES
    assert files_of(store) == [shard(store, number) for number in range(3)]


@pytest.mark.parametrize(
    ("spoil", "expected", "found"),
    [
        (remove(0), "3 shards", "2, without 000000.safetensors"),
        (remove(1), "3 shards", "2, without 000001.safetensors"),
        (remove(2), "3 shards", "2, without 000002.safetensors"),
        (remove_all, "3 shards", "0, without 000000.safetensors"),
        (add("000003"), "3 shards", "4, with 000003.safetensors"),
        (add("more"), "3 shards", "4, with more.safetensors"),
        (exchange, "23 samples", "14 in 3 shards"),
    ],
)
def test_shards_that_the_writer_did_not_write_so_are_refused(
    store: Path, spoil: Callable[[Path], object], expected: str, found: str
) -> None:
    spoil(store)
    error = refused(store)
    (told,) = error.findings
    assert (told.code, told.where.path) == ("store-changed", str(store))
    assert (told.expected, told.found) == (f"{expected}, as shards.end says", found)
    assert "copy the whole store again" in told.fix


@pytest.mark.parametrize("number", [0, 1])
def test_a_gap_is_refused_where_no_end_was_said(store: Path, number: int) -> None:
    (store / END_NAME).unlink()
    remove(number)(store)
    (told,) = refused(store).findings
    assert (told.code, told.found) == ("store-changed", "none of that name")
    assert told.expected.startswith(f"00000{number}.safetensors before 00000{number + 1}.safetensors")


def test_a_store_that_never_ended_is_read_as_far_as_it_goes(store: Path) -> None:
    (store / END_NAME).unlink()
    remove(2)(store)
    assert len(open_reader(store)) == 20
    assert len(files_of(store)) == 2


def test_shards_of_other_names_have_no_gaps(tmp_path: Path) -> None:
    for name in ("3", "000000", "run-000007", "0000009"):
        add(name)(tmp_path)
    assert len(open_reader(tmp_path)) == 4


def test_one_shard_of_a_store_is_read_by_its_name(store: Path) -> None:
    remove(1)(store)
    assert len(open_reader(shard(store, 2))) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"num_shards": 3}',
        '{"num_shards": "3", "num_samples": 23}',
        '{"num_shards": 3, "num_samples": -23}',
        '{"num_shards": true, "num_samples": 23}',
    ],
)
def test_an_end_that_says_nothing_is_refused(store: Path, text: str) -> None:
    (store / END_NAME).write_text(text)
    (told,) = refused(store).findings
    assert (told.code, told.where.path) == ("file-unusable", str(store / END_NAME))


def test_an_empty_run_says_that_it_is_one(tmp_path: Path) -> None:
    with open_writer(tmp_path):
        pass
    (told,) = refused(tmp_path).findings
    assert told.code == "file-unusable"
    assert told.found == "1 entries, none of that name; shards.end says that none were written"


def test_a_harmed_shard_of_a_whole_store_does_not_hide_the_others(store: Path) -> None:
    shard(store, 1).write_bytes(b"rubbish")
    assert files_of(store) == [shard(store, number) for number in range(3)]


def test_names_that_come_while_the_directory_is_listed_are_not_missed(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = store.parent / "late.safetensors"
    shutil.move(shard(store, 1), late)

    def listed(directory: Path) -> object:
        listing = list_directory(directory)
        if late.exists():
            shutil.move(late, shard(store, 1))
        return listing

    monkeypatch.setattr("rlbatch.storage.opening.list_directory", listed)
    assert len(open_reader(store)) == NUM_SAMPLES
