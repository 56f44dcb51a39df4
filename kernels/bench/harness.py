"""What the kernel benches share: interleaved timing, peak memory, peers that may be absent, the report.

Run a bench with the interpreter of an environment that has the peers beside this package; a figure whose peer
is not installed is null. Every figure is a ratio of medians of interleaved runs in one process.
"""

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

RUNS = 7
QUICK_RUNS = 3

Case = Callable[[], object]


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="smaller shapes and fewer runs: under 40 seconds"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    return given


def medians(cases: dict[str, Case | None], runs: int) -> dict[str, float]:
    """Seconds of each case that is there: one run to warm up, then `runs` rounds of all in turn."""
    present = {name: case for name, case in cases.items() if case is not None}
    times: dict[str, list[float]] = {name: [] for name in present}
    for case in present.values():
        case()
    for _ in range(runs):
        for name, case in present.items():
            start = time.perf_counter()
            case()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def ratio(times: dict[str, float], slower: str, faster: str) -> float | None:
    """How many times as long the first takes; None where either is absent."""
    if slower not in times or faster not in times:
        return None
    return times[slower] / times[faster]


def peak_mib(case: Case) -> float | None:
    """Most memory that the process held during the case, beyond what it held before; None where unknown."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return None
    # Memory that was freed and not given back would hide what the case takes.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    # 5 sets the high-water mark back to what is held now.
    reset.write_text("5")
    before = _kib(status, "VmRSS:")
    case()
    return (_kib(status, "VmHWM:") - before) / 1024


def _kib(status: Path, name: str) -> int:
    (line,) = [line for line in status.read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])


def peer(find: Callable[[], Case]) -> Case | None:
    """The case that `find` makes, or None where its peer cannot be imported."""
    try:
        return find()
    except ImportError:
        return None


def report(rows: dict[str, float], figures: dict[str, float | int | None]) -> None:
    """A line for each time, then the figures, and last one line of JSON."""
    for name, seconds in rows.items():
        print(f"{name:44s} {seconds * 1e3:10.2f} ms")
    rounded = {name: value if value is None else float(f"{value:.4g}") for name, value in figures.items()}
    for name, value in rounded.items():
        print(f"{name:44s} {'not installed' if value is None else value:>13}")
    print(json.dumps(rounded))
