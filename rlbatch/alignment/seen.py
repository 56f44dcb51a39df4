"""`Seen`: the trainer's logits of a few tokens, and what families of distributions predict from them.

What more than one family needs is computed once, when it is first asked for.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlbatch_kernels import token_logprobs

Values = NDArray[np.float64]

MOST_KEPT = 1024
"""Largest kept set that is told from the whole vocabulary."""
MAX_EXPONENT = 600.0
"""Beyond, exp would leave float64: logits may be of any size."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """What the trainer says of n neighbouring tokens of one turn."""

    stated: Values
    """[n] nats at the stated temperature."""
    divisor: float
    """The stated temperature."""
    ids: NDArray[np.int64]
    """[n] the tokens."""
    logits: Tensor | None = None
    """[n, V] float32, not divided; None where nobody can be asked."""
    before: NDArray[np.int64]
    """[m] tokens of the sequence that come before, prompt included."""
    num_sampled_before: int
    """How many of the last of them the same turn sampled."""

    @property
    def given_logits(self) -> Tensor:
        """`logits`, for a family that needs them."""
        if self.logits is None:
            raise ValueError("this family needs logits")
        return self.logits

    @cached_property
    def target(self) -> Values:
        """[n] the logit of each token."""
        values: Values = (
            self.given_logits.gather(1, torch.from_numpy(self.ids)[:, None])[:, 0].double().numpy()
        )
        return values

    @cached_property
    def whole(self) -> Values:
        """[n] log of the sum of exp over the vocabulary, of logits over `divisor`."""
        return self.normalisers(np.array([self.divisor]))[:, 0]

    @cached_property
    def at_one(self) -> Values:
        """[n] nats at temperature 1."""
        return self.target - self.normalisers(np.ones(1))[:, 0]

    def normalisers(self, divisors: Values) -> Values:
        """[n, P] the same of logits over each of the divisors."""
        logits, shape = self.given_logits, (len(divisors), len(self.ids))
        # As the kernel rounds them.
        temperature = torch.from_numpy(divisors.astype(np.float32))
        logprobs = token_logprobs(
            logits.expand(len(divisors), *logits.shape),
            torch.from_numpy(self.ids).expand(shape),
            temperature=temperature[:, None].expand(shape),
            mask=torch.ones(shape, dtype=torch.bool),
        )
        whole: Values = self.target[:, None] / temperature.double().numpy() - logprobs.double().numpy().T
        return whole

    @cached_property
    def collision(self) -> Values:
        """[n] sum over the vocabulary of squared probabilities."""
        twice = torch.logsumexp(self.given_logits * (2 / self.divisor), dim=1).double().numpy()
        squared: Values = np.exp(np.minimum(twice - 2 * self.whole, 0))
        return squared

    @cached_property
    def kept(self) -> tuple[Values, Values]:
        """[n, K] probabilities from the largest down, and the mass of the first so many."""
        chances = torch.softmax(self.given_logits / self.divisor, dim=1).numpy()
        beyond = chances.shape[1] - MOST_KEPT
        # A vocabulary not much larger is sorted as fast as it is parted.
        if beyond > 3 * MOST_KEPT:
            chances = np.partition(chances, beyond, axis=1)[:, beyond:]
        top = np.sort(chances, axis=1)[:, : -MOST_KEPT - 1 : -1].astype(np.float64, order="C")
        return top, np.minimum(np.cumsum(top, axis=1), 1.0)

    @cached_property
    def known(self) -> "Known":
        """The ids that a penalty may hold down."""
        return Known.of(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """The U ids that come anywhere in the sequence."""

    logits: Values
    """[n, U], over the divisor."""
    whole: Values
    """[n] log of the sum of exp over the vocabulary, of logits over the divisor."""
    chances: Values
    """[n, U]"""
    column: NDArray[np.intp]
    """[n] which of them each token is."""
    in_sequence: NDArray[np.int64]
    """[n, U] how often each came before each token, prompt included."""
    in_completion: NDArray[np.int64]
    """[n, U] the same among what the turn sampled so far."""

    @classmethod
    def of(cls, seen: Seen) -> Self:
        """Counted and gathered once, for all penalties."""
        ids = np.unique(np.concatenate([seen.before, seen.ids]))
        column = np.searchsorted(ids, seen.ids)
        hits = np.zeros((len(column), len(ids)), np.int64)
        hits[np.arange(len(column)), column] = 1
        within = np.cumsum(hits, axis=0) - hits
        first = len(seen.before) - seen.num_sampled_before
        prompt, sampled = (
            np.bincount(np.searchsorted(ids, part), minlength=len(ids))
            for part in (seen.before[:first], seen.before[first:])
        )
        mine = seen.given_logits[:, torch.from_numpy(ids)].double().numpy() / seen.divisor
        return cls(
            logits=mine,
            whole=seen.whole,
            # At huge logits rounding alone would pass 1.
            chances=np.exp(np.minimum(mine - seen.whole[:, None], 0)),
            column=column,
            in_sequence=within + (prompt + sampled),
            in_completion=within + sampled,
        )

    def own(self, values: NDArray[Any]) -> Values:
        """[n] the column of each token, of [n, U]."""
        own: Values = values[np.arange(len(self.column)), self.column].astype(np.float64)
        return own

    def rest(self, is_held: NDArray[np.bool_]) -> Values:
        """[n] the mass of all ids but those that are held down, of [n, U]."""
        left: Values = np.maximum(1 - (self.chances * is_held).sum(axis=1), 1e-9)
        return left


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """Some of the known ids of each token, of which the logits are multiplied."""

    logits: Values
    """[N], token by token."""
    whole: Values
    """[N] the normaliser of the token."""
    tokens: NDArray[np.intp]
    """[M] the tokens that have any."""
    starts: NDArray[np.intp]
    """[M] where theirs begin."""
    num_tokens: int
    room: Values
    """[N] to compute in."""

    @classmethod
    def of(cls, known: Known, chosen: NDArray[np.bool_]) -> Self:
        """The ids that are chosen, of [n, U]."""
        rows, columns = np.nonzero(chosen)
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        return cls(
            logits=known.logits[rows, columns],
            whole=known.whole[rows],
            tokens=rows[starts],
            starts=starts,
            num_tokens=len(chosen),
            room=np.empty(len(rows)),
        )

    def mass(self, factor: float) -> Values:
        """[n] what their probabilities sum to, with the logits times this."""
        np.multiply(self.logits, factor, out=self.room)
        np.subtract(self.room, self.whole, out=self.room)
        np.minimum(self.room, MAX_EXPONENT, out=self.room)
        np.exp(self.room, out=self.room)
        mass = np.zeros(self.num_tokens)
        if len(self.starts):
            mass[self.tokens] = np.add.reduceat(self.room, self.starts)
        return mass
