"""Collation against a plain copy of the same bytes, against lists, against TRL's `pad`: rows of loader.py.

    plain copy   `Tensor.copy_` of the batch's buffer into another one
    lists        `extend` of Python lists and one `torch.tensor` a column, as trainers that pass lists do
    TRL's pad    `trl.trainer.utils.pad`, once a field, of tensors made of lists as its GRPO trainer makes
                 them; it writes neither targets nor positions

Everything writes memory that is there already, but for the peers, which have no way to be given any. Run with
one thread, medians of rounds in which each takes its turn; the peers, which take up to a hundred times as
long, take theirs in the first rounds only. `sound_in_memory_fraction` is `require_sound` of the same samples:
arrays of their own, which the checks must join first. What a loader's user pays is `sound_fraction`, in
loader.py.
"""

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import median

import torch
from torch import Tensor

from rlbatch.collate import collate
from rlbatch.records import Sample
from rlbatch.soundness import require_sound

PER_TOKEN = (
    "token_ids",
    "inference_logprobs",
    "loss_mask",
    "advantages",
    "policy_version",
    "temperature",
)
"""What a peer is given of each sample."""


PEERS = ("lists", "trl")
PEER_RUNS = 2


def measure(samples: Sequence[Sample], *, runs: int) -> dict[str, float | None]:
    """The keys of the budget table that collation decides; None for a peer that is not installed.

    Args:
        samples: arrays in.
        runs: rounds to take the medians of.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = {layout: _rounds(_contestants(samples, layout), runs) for layout in ("packed", "padded")}
    finally:
        torch.set_num_threads(num_threads)
    packed, padded = seconds["packed"], seconds["padded"]
    return {
        "packed_copy_fraction": packed["copy"] / packed["collate"],
        "padded_copy_fraction": padded["copy"] / padded["collate"],
        "vs_list_extend": packed["lists"] / packed["collate"],
        "vs_trl_pad": padded["trl"] / padded["collate"] if "trl" in padded else None,
        "sound_in_memory_fraction": packed["sound"] / packed["collate"],
        "packed_ms": 1e3 * packed["collate"],
        "padded_ms": 1e3 * padded["collate"],
    }


def _contestants(samples: Sequence[Sample], layout: str) -> dict[str, Callable[[], object]]:
    buffer = collate(samples, layout=layout).buffer
    memory, other = torch.zeros_like(buffer), buffer.clone()
    contestants: dict[str, Callable[[], object]] = {
        "copy": lambda: memory.copy_(other),
        "collate": lambda: collate(samples, layout=layout, allocate=lambda _: memory),
    }
    lists = {name: [getattr(sample, name).tolist() for sample in samples] for name in PER_TOKEN}
    if layout == "packed":
        contestants["lists"] = lambda: packed_from_lists(lists)
        contestants["sound"] = lambda: require_sound(samples)
    elif find_spec("trl"):
        from trl.trainer.utils import pad

        contestants["trl"] = lambda: [pad([torch.tensor(part) for part in lists[name]]) for name in PER_TOKEN]
    return contestants


def packed_from_lists(lists: dict[str, list[list[float]]]) -> list[Tensor]:
    """The columns of a packed batch, from Python lists."""
    ids = lists["token_ids"]
    columns: list[list[float]] = [[] for _ in range(2)]
    for part in ids:
        columns[0].extend([*part[1:], -100])
        columns[1].extend(range(len(part)))
    for parts in lists.values():
        column: list[float] = []
        for part in parts:
            column.extend(part)
        columns.append(column)
    return [torch.tensor(column) for column in columns]


def _rounds(contestants: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in contestants}
    # The first round only warms up.
    for number in range(runs + 1):
        for name, run in contestants.items():
            if name in PEERS and number > PEER_RUNS:
                continue
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: median(seconds[1:]) for name, seconds in times.items()}
