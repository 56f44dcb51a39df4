"""Writing: whole files only, whatever happens to the writer, and bounds that hold."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from storage_cases import plain_sample

from rlbatch.errors import StorageError
from rlbatch.records import identical
from rlbatch.storage import format as storage_format
from rlbatch.storage import open_reader, open_writer, write_shard
from rlbatch.storage.files import END_NAME, write_atomically

NUM_KILLS = 200


def names(directory: Path) -> list[str]:
    """Everything in the directory but the mark of the end."""
    return sorted(path.name for path in directory.iterdir() if path.name != END_NAME)


def test_kill_at_any_moment_leaves_whole_shards_only(tmp_path: Path) -> None:
    script = Path(__file__).with_name("storage_kills.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path, str(NUM_KILLS), "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    met = json.loads(done.stdout)
    assert met["killed"] == NUM_KILLS
    # The kills met what they are for: writers at work, and shards that were finished before.
    assert met["leftovers"] > 0
    assert met["shards"] > 0
    # And whatever they met, every shard was whole, in its place, and every leftover was known for one.
    assert met["wrong_samples"] == met["misnumbered"] == met["unlisted"] == met["other_files"] == 0
    assert met.get("refused", 0) == met.get("without_shards", 0)


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system refuses files above 10,000 bytes, as a full disk does, in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_write_that_the_system_stops_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="File too large") as caught:
        write_shard(tmp_path / "a.safetensors", [plain_sample(1, num_tokens=10_000)])
    assert caught.value.code == "write-failed"
    assert isinstance(caught.value.__cause__, OSError)
    assert names(tmp_path) == []


def test_flush_that_failed_can_be_tried_again_without_loss(tmp_path: Path) -> None:
    big = plain_sample(1, num_tokens=10_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_writer(tmp_path, max_samples=2) as writer:
        writer.append(plain_sample(0))
        writer.append(big)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            with pytest.raises(StorageError):
                writer.append(plain_sample(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert names(tmp_path) == []
        writer.append(plain_sample(2))
    written = [plain_sample(0), big, plain_sample(2)]
    assert all(identical(a, b) for a, b in zip(open_reader(tmp_path), written, strict=True))
    assert names(tmp_path) == ["000000.safetensors", "000001.safetensors"]


def test_interrupt_in_the_middle_of_a_write_leaves_nothing(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a.safetensors", pieces())
    assert names(tmp_path) == []


def test_shard_in_a_directory_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="found:    none of that name") as caught:
        write_shard(tmp_path / "missing" / "a.safetensors", [plain_sample(1)])
    assert caught.value.code == "write-failed"
    assert names(tmp_path) == []


def test_writer_in_a_place_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here first")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError) as caught:
            open_writer(directory)
        assert caught.value.code == "write-failed"
    assert (tmp_path / "file").read_text() == "here first"


@pytest.fixture
def forbidden(tmp_path: Path) -> Iterator[Path]:
    """A directory that this process may not look into, not even where the tests run as root."""
    directory = tmp_path / "forbidden"
    directory.mkdir()
    write_shard(directory / "there.safetensors", [plain_sample(1)])
    directory.chmod(0)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    yield directory
    if was_root:
        os.seteuid(0)
    directory.chmod(0o700)


def test_directory_without_permission_is_an_error(forbidden: Path) -> None:
    for attempt in (
        lambda: write_shard(forbidden / "a.safetensors", [plain_sample(1)]),
        lambda: open_writer(forbidden),
        lambda: open_writer(forbidden / "below"),
        lambda: open_reader(forbidden),
        lambda: open_reader(forbidden / "there.safetensors"),
    ):
        with pytest.raises(StorageError, match="Permission denied"):
            attempt()


def test_shard_is_never_written_over_another_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, [plain_sample(1)])
    before = path.read_bytes()
    with pytest.raises(StorageError, match="written once") as caught:
        write_shard(path, [plain_sample(2)])
    assert caught.value.code == "write-failed"
    assert path.read_bytes() == before
    assert names(tmp_path) == ["a.safetensors"]


def test_no_samples_make_no_shard(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="at least one sample") as caught:
        write_shard(tmp_path / "a.safetensors", [])
    assert caught.value.code == "write-failed"
    with open_writer(tmp_path) as writer:
        writer.flush()
    assert names(tmp_path) == []


def test_writer_splits_by_samples_and_by_tokens(tmp_path: Path) -> None:
    # Lengths 6 6 | 6 3 | 20 | 1 1 1 | 1: three samples or twelve tokens a shard; 20 is too long for any.
    lengths = [6, 6, 6, 3, 20, 1, 1, 1, 1]
    written = [plain_sample(number, num_tokens=length) for number, length in enumerate(lengths)]
    with open_writer(tmp_path / "made" / "here", max_samples=3, max_tokens=12) as writer:
        for sample in written:
            writer.append(sample)
    assert [open_reader(path).lengths.tolist() for path in writer.paths] == [
        [6, 6],
        [6, 3],
        [20],
        [1, 1, 1],
        [1],
    ]
    assert writer.paths == tuple(str(tmp_path / "made" / "here" / f"{n:06d}.safetensors") for n in range(5))
    read = open_reader(tmp_path / "made" / "here")
    assert all(identical(a, b) for a, b in zip(read, written, strict=True))


def test_flush_writes_what_is_there_and_no_empty_shard(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.append(plain_sample(1))
        assert names(tmp_path) == []
        writer.flush()
        writer.flush()
        assert names(tmp_path) == ["000000.safetensors"]
    assert names(tmp_path) == ["000000.safetensors"]


def test_block_that_raises_discards_what_is_not_in_a_shard_and_says_how_much(tmp_path: Path) -> None:
    def fails_after(num_samples: int) -> None:
        with open_writer(tmp_path, max_samples=2) as writer:
            for number in range(num_samples):
                writer.append(plain_sample(number))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        fails_after(5)
    assert names(tmp_path) == ["000000.safetensors", "000001.safetensors"]
    assert len(open_reader(tmp_path)) == 4
    assert caught.value.__notes__ == [
        f"rlbatch: 1 samples that were not yet in a shard of {tmp_path} were discarded"
    ]


def test_block_that_raises_with_nothing_collected_gets_no_note(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught, open_writer(tmp_path):
        raise RuntimeError
    assert not hasattr(caught.value, "__notes__")


def test_sample_that_cannot_be_stored_is_not_taken(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.append(plain_sample(1))
        with pytest.raises(StorageError, match="expected: a Sample"):
            writer.append({"token_ids": [1]})
        writer.append(plain_sample(3))
    assert [sample.sample_id for sample in open_reader(tmp_path)] == ["task/1#0.0", "task/3#0.0"]


def test_writer_is_closed_after_its_block(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.append(plain_sample(1))
    with pytest.raises(StorageError, match="closed"):
        writer.append(plain_sample(2))


def test_directory_that_holds_shards_is_refused_with_a_way_out(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.safetensors", [plain_sample(1)])
    with pytest.raises(StorageError, match=r"x\.safetensors") as caught:
        open_writer(tmp_path)
    assert caught.value.code == "file-unusable"
    assert "new directory" in caught.value.findings[0].fix


@pytest.mark.parametrize("bound", ["max_samples", "max_tokens"])
def test_bound_below_one_is_refused(bound: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"{bound} of at least 1"):
        open_writer(tmp_path / "new", **{bound: 0})
    assert names(tmp_path) == []


def test_header_above_the_cap_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The cap itself is lowered: a header of 64 MiB takes a minute to make.
    monkeypatch.setattr(storage_format, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(StorageError, match="at most 1000 bytes") as caught:
        write_shard(tmp_path / "a.safetensors", [plain_sample(1)])
    assert caught.value.code == "write-failed"
    assert names(tmp_path) == []


def test_a_directory_belongs_to_one_writer_from_the_moment_it_is_opened(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        with pytest.raises(StorageError, match="found:    one that a writer is filling") as caught:
            open_writer(tmp_path)
        assert caught.value.code == "file-unusable"
        writer.append(plain_sample(0))
    with pytest.raises(StorageError, match="directory without"):
        open_writer(tmp_path)


def test_a_writer_that_gave_up_before_its_first_shard_leaves_the_directory_free(tmp_path: Path) -> None:
    gave_up = open_writer(tmp_path)

    def fails() -> None:
        with gave_up:
            gave_up.append(plain_sample(0))
            raise LookupError

    with pytest.raises(LookupError):
        fails()
    with open_writer(tmp_path) as writer:
        writer.append(plain_sample(1))
    assert identical(open_reader(tmp_path)[0], plain_sample(1))


def test_a_process_forked_meanwhile_keeps_no_directory(tmp_path: Path) -> None:
    def fails() -> None:
        nonlocal child
        with open_writer(tmp_path):
            child = subprocess.Popen(["sleep", "60"], pass_fds=handles_of(tmp_path))
            raise LookupError

    child = None
    with pytest.raises(LookupError):
        fails()
    try:
        assert child is not None
        assert child.poll() is None
        open_writer(tmp_path)
    finally:
        child.kill()
        child.wait()


def handles_of(directory: Path) -> list[int]:
    """This process's open handles of a directory, which a fork copies."""
    links = {int(link.name): link for link in Path("/proc/self/fd").iterdir()}
    return [number for number, link in links.items() if link.exists() and link.samefile(directory)]


def test_a_forked_process_that_lets_go_leaves_the_directory_to_its_writer(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        child = os.fork()
        if not child:
            writer._let_go()
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(StorageError, match="a writer is filling"):
            open_writer(tmp_path)


def test_a_writer_that_was_refused_keeps_no_directory(tmp_path: Path) -> None:
    shard = tmp_path / "x.safetensors"
    write_shard(shard, [plain_sample(1)])
    # The error holds all that it passed through, the writer too.
    with pytest.raises(StorageError) as caught:
        open_writer(tmp_path)
    shard.unlink()
    open_writer(tmp_path)
    assert caught.value.code == "file-unusable"


@pytest.mark.parametrize(("number", "refused"), [(errno.ENOLCK, False), (errno.EIO, True)])
def test_a_file_system_without_locks_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, refused: bool
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("rlbatch.storage.files.fcntl.flock", fails)
    with pytest.raises(StorageError, match="found:    Input/output error") if refused else nullcontext():
        open_writer(tmp_path)
