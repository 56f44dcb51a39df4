"""Kill writers of shards at random moments and look at what each leaves: run by tests/test_storage_writer.py.

    python storage_kills.py DIRECTORY NUM_KILLS SEED

Every child is a fork that writes shards as fast as it can until SIGKILL. Afterwards every file that bears a
shard's name must read whole and verified and hold just what was written. Prints what the kills met, as JSON.
"""

import collections
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from storage_cases import plain_sample

from rlbatch.errors import StorageError
from rlbatch.records import identical
from rlbatch.storage import open_reader, open_writer

NUM_TOKENS = 20_000
"""About half a megabyte a shard, so that kills meet half-written files."""
SAMPLES = [plain_sample(number, num_tokens=NUM_TOKENS) for number in range(8)]
LONGEST_LIFE = 0.04
"""Seconds; from before the first file to some shards."""


def write_until_killed(directory: Path) -> None:
    with open_writer(directory, max_samples=1) as writer:
        number = 0
        while True:
            writer.append(SAMPLES[number % len(SAMPLES)])
            number += 1


def look(directory: Path, met: collections.Counter[str]) -> None:
    names = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    temporary = [name for name in names if name.startswith(".")]
    shards = [name for name in names if name.endswith(".safetensors")]
    met["other_files"] += len(names) - len(temporary) - len(shards)
    met["leftovers"] += len(temporary)
    met["shards"] += len(shards)
    listed = [str(directory / name) for name in temporary]
    if shards:
        reader = open_reader(directory)
        samples = reader.samples()
        met["wrong_samples"] += sum(
            not identical(sample, SAMPLES[number % len(SAMPLES)]) for number, sample in enumerate(samples)
        )
        met["misnumbered"] += shards != [f"{number:06d}.safetensors" for number in range(len(samples))]
        met["unlisted"] += list(reader.leftovers) != listed
        whole = Path(reader.paths[0]).stat().st_size
        met["half_written"] += any(Path(path).stat().st_size < whole for path in listed)
        return
    met["without_shards"] += 1
    try:
        open_reader(directory)
    except StorageError as error:
        met["refused"] += error.code == "file-unusable"
    met["unlisted"] += list(open_writer(directory).leftovers) != listed


def main(root: Path, num_kills: int, seed: int) -> None:
    rng = random.Random(seed)
    met: collections.Counter[str] = collections.Counter()
    for number in range(num_kills):
        directory = root / f"{number:03d}"
        pid = os.fork()
        if pid == 0:
            write_until_killed(directory)
            os._exit(1)
        time.sleep(rng.uniform(0, LONGEST_LIFE))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        met["killed"] += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        look(directory, met)
        shutil.rmtree(directory, ignore_errors=True)
    sys.stdout.write(json.dumps(met))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
