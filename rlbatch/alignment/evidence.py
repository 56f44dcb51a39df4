"""`Evidence`: one suspect segment on the host, and what pairs of its values say. Decides nothing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.alignment.limits import LEFT_FACTOR, LEFT_LEAST, LEFT_MOST, ROWS_HEAD
from rlbatch.errors import Where
from rlbatch.records import Provenance
from rlbatch_kernels import LAGS, RESIDUAL_CLIP

if TYPE_CHECKING:
    from rlbatch.alignment.exhibits import Window


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """The sequence that a segment is part of."""

    ids: NDArray[np.int64]
    """[S] tokens of the sequence up to the end of the segment."""
    prompt_length: int
    """Tokens of the sequence before its first sampled one."""
    padding: int
    """Positions by which the sequence is shorter than the longest of the batch."""
    index: int
    """Of the sequence in its batch."""
    is_packed: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """All segments of the batch, to which one that is off may belong."""

    everyone: "tuple[Evidence, ...]"
    heads: NDArray[np.float64]
    """[G, H] the first trainer logprobs of each; NaN where there is none."""

    @classmethod
    def of(cls, everyone: "Iterable[Evidence]") -> Self:
        """Heads are of `ROWS_HEAD` tokens."""
        segments = tuple(everyone)
        heads = np.full((len(segments), ROWS_HEAD), np.nan)
        for at, each in enumerate(segments):
            values = np.where(each.trained & np.isfinite(each.trainer), each.trainer, np.nan)[:ROWS_HEAD]
            heads[at, : len(values)] = values
        return cls(everyone=segments, heads=heads)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """Trainer and engine on N neighbouring tokens of one turn."""

    trainer: NDArray[np.float64]
    """[N] nats."""
    inference: NDArray[np.float64]
    """[N] nats."""
    trained: NDArray[np.bool_]
    """[N]; nothing is concluded from other tokens."""
    versions: NDArray[np.int64]
    """[N] labels of the weights that drew each token; -1 unknown."""
    divisor: float
    """What the logits were divided by, as stated."""
    provenance: Provenance
    comparable: bool
    """The two are of one distribution, so that they may be expected to agree at some lag."""
    current: bool
    """Drawn by the very weights that the trainer has."""
    place: Where
    """All N tokens."""
    context: Context
    floor: float | None
    """Mean |log_ratio| of segments like it, nats: what noise leaves; None where too few are there to say."""
    rows: Callable[[], Rows]
    """The batch; made when it is first asked for."""
    ask: Callable[[int, int], Tensor] | None
    """Logits [stop - start, V] of entries start:stop, checked; None where nobody can be asked."""
    windows: "dict[tuple[int, int], Window]" = field(default_factory=dict, repr=False)
    """What was made of entries start:stop, where a pool keeps it anyway: it is not made again."""

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
        ask = self.ask
        return replace(
            self,
            trainer=self.trainer[start:stop],
            inference=self.inference[start:stop],
            trained=self.trained[start:stop],
            versions=self.versions[start:stop],
            place=replace(self.place, start=self.first_token + start, stop=self.first_token + stop),
            context=replace(self.context, ids=self.context.ids[: self.first_token + stop]),
            ask=None if ask is None else lambda first, last: ask(start + first, start + last),
            windows={},
        )

    @property
    def most_left(self) -> float:
        """Mean |difference|, nats, that an explanation may leave: what noise does, where that is known."""
        if self.floor is None:
            return LEFT_MOST
        return min(LEFT_MOST, max(LEFT_LEAST, LEFT_FACTOR * self.floor))

    @property
    def ids(self) -> NDArray[np.int64]:
        """[N] the tokens."""
        return self.context.ids[self.first_token :]

    @property
    def usable(self) -> NDArray[np.bool_]:
        """[N]; trained and finite on both sides."""
        return self.trained & np.isfinite(self.trainer) & np.isfinite(self.inference)

    def log_ratio(self) -> NDArray[np.float64]:
        """[N] trainer - inference; 0 where not usable."""
        usable = self.usable
        difference: NDArray[np.float64] = np.where(usable, self.trainer, 0) - np.where(
            usable, self.inference, 0
        )
        return difference

    def at_zero(self) -> NDArray[np.float64]:
        """[N] clipped |difference| of each token; 0 where not usable."""
        clipped: NDArray[np.float64] = np.minimum(np.abs(self.log_ratio()), RESIDUAL_CLIP)
        return clipped

    def at_lag(self, lag: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Positions t of the pairs (inference t, trainer t + lag), and their clipped |difference|."""
        usable = self.usable
        length = len(usable)
        at = np.arange(max(0, -lag), max(0, -lag, min(length, length - lag)))
        at = at[usable[at] & usable[at + lag]]
        return at, np.minimum(np.abs(self.inference[at] - self.trainer[at + lag]), RESIDUAL_CLIP)

    def residuals(self, lags: Iterable[int] = LAGS) -> dict[int, float]:
        """Mean clipped |difference| at each lag that has pairs, as `at_lag` has them."""
        usable, length = self.usable, len(self.trained)
        trainer, inference = (np.where(usable, side, np.nan) for side in (self.trainer, self.inference))
        all_usable = bool(usable.all())
        found: dict[int, float] = {}
        for lag in lags:
            ours = inference[max(0, -lag) : max(0, min(length, length - lag))]
            theirs = trainer[max(0, lag) : max(0, min(length, length + lag))]
            errors = np.minimum(np.abs(ours - theirs), RESIDUAL_CLIP)
            errors = errors if all_usable else errors[~np.isnan(errors)]
            if len(errors):
                found[lag] = float(np.add.reduce(errors)) / len(errors)
        return found
