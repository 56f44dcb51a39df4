"""The loader against its budgets: packing, ranks, collation, and from shard to packed batch.

    python kernels/bench/loader.py [--quick] [--memory GIGABYTES]

One process, medians of interleaved rounds; peers are measured beside ours where they are installed: trl for
its `pad`, verl for its partition. The last line is JSON. With `--memory` a store of that size is written and
read once in each order instead, and the growth of the process's resident memory is printed.

`sound_fraction` is what a user of the loader pays: `require_sound` on one step as it is read from shards,
where samples lie end to end, by the collation of the step into batches of 16,384 tokens.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import collation
import torch
import workload

from rlbatch.collate import collate
from rlbatch.loader import Feed, RolloutLoader, Steps
from rlbatch.loader.ring import BufferRing
from rlbatch.packing import Room, balance, imbalance, plan_batches
from rlbatch.soundness import require_sound
from rlbatch.storage import open_reader, open_writer

NUM_LENGTHS = 100_000
NUM_RANKS = 8
MAX_TOKENS = 16_384
NUM_COLLATED = 1024
PEER_LENGTHS = 4096
"""What verl's partition is given: its time grows with the square, to 6 s at 100,000."""


def seconds(run: Callable[[], object], rounds: int) -> float:
    """Median time of a call, after one that warms up."""
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def measure_packing(rounds: int) -> dict[str, float | None]:
    """Best fit of 100,000 lengths, and their balance over 8 ranks."""
    lengths = workload.lengths(NUM_LENGTHS).tolist()
    room = Room(layout="packed", max_tokens=MAX_TOKENS)
    plan = plan_batches(lengths, room)
    shares = balance(lengths, NUM_RANKS)
    return {
        "pack_100k_ms": 1e3 * seconds(lambda: plan_batches(lengths, room), rounds),
        "pack_fill": sum(lengths) / (len(plan) * MAX_TOKENS),
        "balance_100k_ms": 1e3 * seconds(lambda: balance(lengths, NUM_RANKS), rounds),
        "balance_imbalance": imbalance(lengths, shares),
        **_measure_verl(lengths[:PEER_LENGTHS], rounds),
    }


def _measure_verl(lengths: list[int], rounds: int) -> dict[str, float | None]:
    if not find_spec("verl"):
        return {"balance_4k_ms": None, "verl_balance_4k_ms": None}
    from verl.utils.seqlen_balancing import karmarkar_karp

    def theirs() -> object:
        return karmarkar_karp(lengths, NUM_RANKS, equal_size=False)

    return {
        "balance_4k_ms": 1e3 * seconds(lambda: balance(lengths, NUM_RANKS), rounds),
        "verl_balance_4k_ms": 1e3 * seconds(theirs, min(rounds, 3)),
    }


def write_store(directory: Path, num_tokens: int) -> None:
    """A store of at least so many tokens."""
    written = seed = 0
    with open_writer(directory) as writer:
        while written < num_tokens:
            for sample in workload.trajectories(NUM_COLLATED, seed, first=seed * NUM_COLLATED):
                writer.append(sample)
                written += len(sample)
            seed += 1


def read_store(directory: Path, *, prefetch: int) -> float:
    """Open, verify, check, pack and collate all of it; millions of tokens a second."""
    start = time.perf_counter()
    loader = RolloutLoader(
        directory, layout="packed", max_tokens=MAX_TOKENS, steps=Steps(), feed=Feed(prefetch=prefetch)
    )
    for batch in loader:
        del batch
    took = time.perf_counter() - start
    return loader.metrics()["rlbatch/loader_num_tokens/sum"] / took / 1e6


def measure_store(num_tokens: int, rounds: int) -> dict[str, float]:
    """From shard to packed batch, with and without a thread of the loader's own; and the checks in it."""
    directory = Path(tempfile.mkdtemp(prefix="rlbatch-bench-"))
    try:
        write_store(directory / "store", num_tokens)
        rates: dict[int, list[float]] = {0: [], 2: []}
        for _ in range(rounds + 1):
            for prefetch, found in rates.items():
                found.append(read_store(directory / "store", prefetch=prefetch))
        sound_fraction = measure_sound(directory / "store", rounds)
    finally:
        shutil.rmtree(directory)
    # The first round brings the files into the system's cache.
    middle = {prefetch: median(found[1:]) for prefetch, found in rates.items()}
    return {
        "store_mtok_s": max(middle.values()),
        "store_in_line_mtok_s": middle[0],
        "store_ahead_mtok_s": middle[2],
        "sound_fraction": sound_fraction,
    }


def measure_sound(store: Path, rounds: int) -> float:
    """Time of `require_sound` for one step as the loader reads it, by that of collating its batches."""
    samples = open_reader(store).read(range(NUM_COLLATED))
    room = Room(layout="packed", max_tokens=MAX_TOKENS)
    plan = plan_batches([len(sample) for sample in samples], room)
    ring = BufferRing(num_spare=2, pinned=False)

    def batches() -> None:
        for batch in plan:
            collate([samples[at] for at in batch], layout="packed", allocate=ring.allocate)

    times: dict[Callable[[], object], list[float]] = {lambda: require_sound(samples): [], batches: []}
    for _ in range(3 * rounds):
        for run, found in times.items():
            found.append(seconds(run, 1))
    sound, collated = (median(found) for found in times.values())
    return sound / collated


def resident_mb() -> float:
    """Memory of this process now, its pages of mapped files too."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1e3


def measure_memory(gigabytes: float, directory: Path) -> None:
    """Write a store of this size, read it in both orders, and print the largest growth of memory."""
    bytes_a_token = 23.0
    write_store(directory, int(gigabytes * 1e9 / bytes_a_token))
    size = sum(path.stat().st_size for path in directory.iterdir())
    growth = {}
    for order, seed in (("stored", None), ("shuffled", 0)):
        loader = RolloutLoader(
            directory, layout="packed", max_tokens=MAX_TOKENS, steps=Steps(seed=seed), feed=Feed(prefetch=2)
        )
        before, most, start = resident_mb(), 0.0, time.perf_counter()
        for number, batch in enumerate(loader):
            del batch
            if number % 16 == 0:
                most = max(most, resident_mb())
        growth[order] = most - before
        print(
            f"{order}: a store of {size / 1e6:.0f} MB in {time.perf_counter() - start:.0f} s, "
            f"resident {before:.0f} MB before and at most {most:.0f} MB meanwhile"
        )
    print(json.dumps({"store_mb": size / 1e6, "growth_mb": growth}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="under 40 seconds")
    parser.add_argument("--memory", type=float, help="size of the store to read, in gigabytes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory is not None:
        directory = Path(tempfile.mkdtemp(prefix="rlbatch-bench-"))
        try:
            measure_memory(options.memory, directory / "store")
        finally:
            shutil.rmtree(directory)
        return
    rounds = 3 if options.quick else 9
    figures: dict[str, float | None] = {}
    figures |= measure_packing(rounds)
    # Before the store, which leaves the heap in pieces: packed collation then takes about 1.3 times as long.
    figures |= collation.measure(workload.trajectories(NUM_COLLATED), runs=rounds)
    figures |= measure_store(4_000_000 if options.quick else 20_000_000, rounds)
    for name, value in figures.items():
        print(f"{name:24s} {'not installed' if value is None else f'{value:.6g}'}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
