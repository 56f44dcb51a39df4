"""Noise between engine and trainer beyond what the rollouts have: the trainer's logits are perturbed.

Tokens and the engine's logprobs stay as they were drawn. The same sample gets the same noise every time.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError
from rlbatch.records import Sample

Tails: TypeAlias = Literal["light", "heavy"]
TAILS: tuple[Tails, ...] = ("light", "heavy")

HEAVY_FREEDOM = 3.5
"""Degrees of freedom of the scale of one position in heavy tails: few positions have most of the noise.

So it is where a router or a kernel decides otherwise for a token: all its logits move together. At a KLD of
0.028 two tokens in 10,000 are 7 nats off, about as in runs of large models, and one in 100,000 is 20, of
188,000 tokens of the example's rollouts; at 3 degrees it is four of them. Light tails reach 3 nats.
"""
MAX_POSITIONS = 2048
"""On which the scale is found: the mean KLD is known to about a tenth then."""
SCALES_DRAWN = 1 << 20
"""Of which evenly spread ones are taken: a mean over drawn ones would hang on the largest two or three."""
SCALE_FROM, SCALE_TO = 1e-4, 1e3
"""Nats between which the scale is looked for."""
BISECTIONS = 14
"""Of a range of seven decades: the scale is known to a tenth of a per cent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How far the trainer is moved."""

    kld: float = 0.0
    """Mean KL(engine || trainer) a sampled token that the noise alone makes, nats; 0 leaves it as it is."""
    tails: Tails = "light"

    def __post_init__(self) -> None:
        if not 0 <= self.kld <= 1:
            raise RecordError(f"Noise.kld: expected 0 to 1 nats, found {self.kld}")
        if self.tails not in TAILS:
            raise RecordError(f"Noise.tails: expected {' or '.join(TAILS)}, found {self.tails!r}")


def draw(sample: Sample, shape: tuple[int, int], tails: Tails) -> NDArray[np.float32]:
    """[T, V] noise of one sample, at scale 1; its name decides it, and the place counted from the end.

    So a row with another id in it, or with less of its prompt, keeps the noise that it had without the fault:
    what the fault moves can be told from what the noise does.
    """
    name = f"{sample.provenances[0].dtype} {sample.sample_id}".encode()
    rng, scales = (np.random.default_rng([zlib.crc32(name), part]) for part in (0, 1))
    noise = rng.standard_normal(shape, np.float32)
    if tails == "heavy":
        noise *= _heavy_scales((shape[0], 1), scales).astype(np.float32)
    return noise[::-1]


def scale_for(noise: Noise, logits: Sequence[NDArray[Any]], units: Sequence[NDArray[Any]]) -> float:
    """The scale at which the noise has the KLD asked for, to a per cent on these positions.

    Args:
        noise: with a KLD above 0.
        logits: [N, V] each, divided by the temperature, of some positions that predict sampled tokens.
        units: light noise at scale 1 of the same positions, divided by the temperature too.

    Raises:
        RecordError: no scale does: the model is certain everywhere.
    """
    at_rest, unit = (np.concatenate(each).astype(np.float64) for each in (logits, units))
    if noise.tails == "heavy":
        unit *= _even_scales(len(unit))[:, None]
    low, high = np.log(SCALE_FROM), np.log(SCALE_TO)
    if _kld(at_rest, at_rest + SCALE_TO * unit) < noise.kld:
        raise RecordError(f"noise: expected a model that can be {noise.kld:g} nats off, found it too certain")
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if _kld(at_rest, at_rest + np.exp(middle) * unit) < noise.kld:
            low = middle
        else:
            high = middle
    return float(np.exp(high))


def _heavy_scales(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float64]:
    """Of positions, in heavy tails."""
    scales: NDArray[np.float64] = np.sqrt(HEAVY_FREEDOM / rng.chisquare(HEAVY_FREEDOM, shape))
    return scales


def _even_scales(num: int) -> NDArray[np.float64]:
    """[N] one of each N-th part of their distribution, in any order."""
    rng = np.random.default_rng(0)
    drawn = _heavy_scales((SCALES_DRAWN,), rng)
    return rng.permutation(np.quantile(drawn, (np.arange(num) + 0.5) / num))


def _kld(engine: NDArray[np.float64], trainer: NDArray[np.float64]) -> float:
    """Mean KL(engine || trainer) of rows of logits."""
    ours, theirs = _log_softmax(engine), _log_softmax(trainer)
    return float((np.exp(ours) * (ours - theirs)).sum(-1).mean())


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised
