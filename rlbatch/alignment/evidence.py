"""`Evidence`: one suspect segment on the host, and what pairs of its values say. Decides nothing."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import Where
from rlbatch.records import Provenance
from rlbatch_kernels import LAGS, RESIDUAL_CLIP


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """Trainer and engine on N neighbouring tokens of one turn."""

    trainer: NDArray[np.float64]
    """[N] nats."""
    inference: NDArray[np.float64]
    """[N] nats."""
    trained: NDArray[np.bool_]
    """[N]; nothing is concluded from other tokens."""
    provenance: Provenance
    comparable: bool
    """The two are of one distribution, so that they may be expected to agree at some lag."""
    current: bool
    """Drawn by the very weights that the trainer has."""
    place: Where
    """All N tokens."""

    @property
    def first_token(self) -> int:
        """Token of the sample that entry 0 is of."""
        return self.place.start or 0

    def where(self, tokens: NDArray[np.intp]) -> Where:
        """The span from the first to the last of `tokens`, counted in the sample."""
        first, last = int(tokens[0]), int(tokens[-1])
        return replace(self.place, start=self.first_token + first, stop=self.first_token + last + 1)

    def part(self, start: int, stop: int) -> Self:
        """The same of entries start:stop alone."""
        return replace(
            self,
            trainer=self.trainer[start:stop],
            inference=self.inference[start:stop],
            trained=self.trained[start:stop],
            place=replace(self.place, start=self.first_token + start, stop=self.first_token + stop),
        )

    @property
    def usable(self) -> NDArray[np.bool_]:
        """[N]; trained and finite on both sides."""
        return self.trained & np.isfinite(self.trainer) & np.isfinite(self.inference)

    def at_zero(self) -> NDArray[np.float64]:
        """[N] clipped |difference| of each token; 0 where not usable."""
        usable = self.usable
        difference = np.where(usable, self.trainer, 0) - np.where(usable, self.inference, 0)
        clipped: NDArray[np.float64] = np.minimum(np.abs(difference), RESIDUAL_CLIP)
        return clipped

    def at_lag(self, lag: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Positions t of the pairs (inference t, trainer t + lag), and their clipped |difference|."""
        usable = self.usable
        length = len(usable)
        at = np.arange(max(0, -lag), max(0, -lag, min(length, length - lag)))
        at = at[usable[at] & usable[at + lag]]
        return at, np.minimum(np.abs(self.inference[at] - self.trainer[at + lag]), RESIDUAL_CLIP)

    def residuals(self) -> dict[int, float]:
        """Mean clipped |difference| at each lag that has pairs."""
        return {lag: float(errors.mean()) for lag in LAGS if len(errors := self.at_lag(lag)[1])}
