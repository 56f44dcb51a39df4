"""`Evidence`: one suspect segment on the host, and what pairs of its values say. Decides nothing."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.alignment.limits import LEFT_FACTOR, LEFT_LEAST, LEFT_MOST, ROWS_HEAD
from rlbatch.errors import Where
from rlbatch.records import Provenance
from rlbatch_kernels import LAGS, RESIDUAL_CLIP

if TYPE_CHECKING:
    from rlbatch.alignment.exhibits import Window

LAGS_AT_ONCE = 32
"""Lags of a segment that are measured together: of 2,048 tokens they are 512 KiB."""


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
    known_residuals: dict[int, float | None] = field(default_factory=dict, repr=False)
    """What `residuals` has found at each lag; None where it has no pair."""

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
            known_residuals={},
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

    def residuals(self, lags: Sequence[int] = LAGS) -> dict[int, float]:
        """Mean clipped |difference| at each lag that has pairs, as `at_lag` has them; kept once found."""
        missing = [lag for lag in lags if lag not in self.known_residuals]
        for first in range(0, len(missing), LAGS_AT_ONCE):
            self._measure(missing[first : first + LAGS_AT_ONCE])
        return {lag: value for lag in lags if (value := self.known_residuals[lag]) is not None}

    def _measure(self, lags: Sequence[int]) -> None:
        usable, length = self.usable, len(self.trained)
        most = max(abs(lag) for lag in lags)
        partner, is_partner = np.full(length + 2 * most, np.nan), np.zeros(length + 2 * most, bool)
        partner[most : most + length] = np.where(usable, self.trainer, np.nan)
        is_partner[most : most + length] = usable
        # [lags, N]: row k begins at the partner of entry 0 at lag k.
        rows = np.array(lags) + most
        errors = sliding_window_view(partner, length)[rows]
        np.subtract(np.where(usable, self.inference, np.nan), errors, out=errors)
        np.abs(errors, out=errors)
        # What has no pair is NaN: it becomes the clip, and is taken off again.
        np.fmin(errors, RESIDUAL_CLIP, out=errors)
        pairs = np.count_nonzero(sliding_window_view(is_partner, length)[rows] & usable, axis=1)
        totals = errors.sum(axis=1) - RESIDUAL_CLIP * (length - pairs)
        for lag, total, num_pairs in zip(lags, totals.tolist(), pairs.tolist(), strict=True):
            self.known_residuals[lag] = max(total, 0.0) / num_pairs if num_pairs else None
