"""Steps whose trainer has other weights than the engine: no code is for that, and none may name it.

Weights are moved as a lost adapter, a coarse quantisation or a half-loaded checkpoint moves them. Right are
`unexplained`, `kld-high`, or silence where the difference is no larger than drift.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlbatch.drill import Noise, Scores, findings_of
from rlbatch.drill.tally import NAMELESS
from rlbatch.records import Sample
from rlbatch.scoring import model_vocab_size

STEP_ROWS = 64
RANK = 4

Move = Callable[[str, Tensor, torch.Generator], Tensor]
"""What is added to one matrix, in its standard deviations; 0 where it stays."""


def everywhere(name: str, matrix: Tensor, rng: torch.Generator) -> Tensor:
    """Noise in every matrix."""
    return torch.randn(matrix.shape, generator=rng)


def low_rank(name: str, matrix: Tensor, rng: torch.Generator) -> Tensor:
    """An adapter that one side lost."""
    if "proj" not in name:
        return torch.zeros(())
    left, right = (torch.randn(size, RANK, generator=rng) for size in matrix.shape)
    return left @ right.T / RANK**0.5


def first_layers(name: str, matrix: Tensor, rng: torch.Generator) -> Tensor:
    """The first two layers of three, as of a checkpoint that was loaded in part."""
    moved = "layers.0." in name or "layers.1." in name
    return torch.randn(matrix.shape, generator=rng) if moved else torch.zeros(())


KINDS: dict[str, tuple[Move, tuple[float, ...]]] = {
    "everywhere": (everywhere, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "low-rank": (low_rank, (0.1, 0.2, 0.4, 0.6)),
    "first-layers": (first_layers, (0.2, 0.35, 0.5, 0.7)),
}
"""Each with its sizes, from a KLD below 0.01 to one above 0.1."""


def with_other_weights(model: nn.Module, move: Move, size: float, seed: int) -> nn.Module:
    """A copy whose matrices are moved by `size` standard deviations."""
    other = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, matrix in other.named_parameters():
            if matrix.dim() == 2:
                matrix.add_(move(name, matrix, rng) * matrix.std() * size)
    return other


def judged_with_other_weights(
    model: nn.Module, samples: Sequence[Sample], *, draws: int
) -> Iterator[dict[str, Any]]:
    """Steps of each kind and size, `draws` times: how many were told what, so far.

    Args:
        model: that of the engine.
        samples: clean rows.
        draws: of weights and of rows, for each kind and size.

    Yields:
        {"steps": n, "named": n, "codes": {code: steps}, "wrong": {"kind size: code": steps}}.
    """
    codes: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    num_steps = num_named = 0
    for draw in range(draws):
        rows = np.random.default_rng(draw).permutation(len(samples))[:STEP_ROWS]
        for kind, (move, sizes) in KINDS.items():
            for size in sizes:
                other = with_other_weights(model, move, size, draw)
                scores = Scores(other, vocab_size=model_vocab_size(other), noise=Noise(), calibrate_on=())
                told = findings_of([samples[at] for at in rows], scores, layout="packed")
                found = {each.code for each in told} or {"(nothing)"}
                named = found - {*NAMELESS, "(nothing)"}
                codes.update(found)
                wrong.update(f"{kind} {size}: {code}" for code in named)
                num_steps += 1
                num_named += bool(named)
        yield {"steps": num_steps, "named": num_named, "codes": dict(codes), "wrong": dict(wrong)}
