"""Kept sets: what top-k, top-p and min-p sampling leaves of a vocabulary, recomputed or replayed.

An engine that reports logprobs after truncation renormalises them over its kept set, so a trainer's are
compared over the same set. `Truncation` finds it from the trainer's own logits as vLLM does: logits over
temperature; then min_p, then top_k, then top_p of what is left. All that equal the k-th are kept, as in its
PyTorch path (its Triton kernel keeps k). Of equals at the edge of a nucleus it keeps as many as are needed;
which, its sort decides; here the target is one of them, since it was drawn. `KeptIds` replays recorded sets.

A target outside its set has probability 0 there, so its logprob is -inf, a constant. Knows nothing of how
logprobs are computed: a set only puts -inf where a tile of logits lies outside.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from rlbatch_kernels.arguments import (
    ID_DTYPES,
    LOGPROB_DTYPES,
    Trained,
    offenders,
    require_device,
    require_shape,
    require_tensor,
)
from rlbatch_kernels.errors import DtypeError, ScaleError, ShapeError, TokenRangeError
from rlbatch_kernels.reference import compute_dtype
from rlbatch_kernels.softmax import Softmax
from rlbatch_kernels.vocabulary import Vocabulary

NO_ID = -1
"""Fills the rows of `KeptIds.ids` whose set is smaller than K."""

CANDIDATES = 2048
"""Most probable tokens in which the edge of a nucleus is looked for first: a seventh of a sort's time at a
vocabulary of 150,000. Rows whose nucleus is larger are sorted whole."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Truncation:
    """Kept sets by rule, the same for all positions or one a position; each rule has a value that is off."""

    top_k: int | Tensor = 0
    """The k most probable; an int, or [...] integer; 0, V and above are off."""
    top_p: float | Tensor = 1.0
    """The fewest most probable that together reach p; a float, or [...] float32 or float64; 1 is off."""
    min_p: float | Tensor = 0.0
    """Those at least min_p times as probable as the most probable one; likewise; 0 is off."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptIds:
    """Kept sets by their members, as recorded."""

    ids: Tensor
    """[..., K] integer; where trained at least one id in [0, V), and `NO_ID` in what is left of the row."""


Kept: TypeAlias = Truncation | KeptIds


class _KeptSets(Vocabulary):
    """The sets of the N trained rows, held fixed: no gradient reaches what decides them."""

    excludes_nothing = False

    def upstream(self, softmax: Softmax, grad_logprobs: Tensor) -> Tensor:
        """Nothing of targets outside: 0 times infinity, which a loss may give there, is NaN."""
        return grad_logprobs.masked_fill(softmax.logprobs() == -math.inf, 0.0)


def select_kept(kept: object, trained: Trained, *, vocab_size: int, like: tuple[str, Tensor]) -> Vocabulary:
    """Check `kept` against the argument `like` [..., X] and gather what is trained."""
    if isinstance(kept, Truncation):
        columns = [_column(rule, getattr(kept, rule.name), trained, like) for rule in _RULES]
        return _Recomputed(trained, *columns)
    if isinstance(kept, KeptIds):
        return _Listed(_members(kept.ids, trained, vocab_size, like))
    raise DtypeError(f"kept: found {type(kept).__name__}, expected a Truncation, a KeptIds or None")


class _Recomputed(_KeptSets):
    """Sets by rule: of each row the lowest logit kept, and from which id on those equal to it are.

    Both are found in one dtype and shape of tile and used in the same, so that the edge itself stays inside.
    """

    needs_whole_rows = True

    def __init__(self, trained: Trained, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
        self._temperature, self._target_ids = trained.temperature, trained.target_ids
        self._top_k, self._top_p, self._min_p = top_k, top_p, min_p
        self._largest_k = int(top_k.max()) if len(top_k) else 0
        self._any_top_p, self._any_min_p = bool((top_p < 1).any()), bool((min_p > 0).any())
        self._lowest = torch.full_like(trained.temperature, -math.inf)
        self._first_id = torch.zeros_like(trained.target_ids)
        self._any_tie = False

    def learn(self, logits: Tensor, rows: slice) -> None:
        scaled = self._scaled(logits, rows)
        if self._any_min_p:
            _exclude_improbable(scaled, self._min_p[rows])
        if self._largest_k:
            _exclude_beyond_top_k(scaled, self._top_k[rows], self._largest_k)
        # -inf itself is no edge: what is excluded must not be kept for being equal to it.
        lowest = scaled.masked_fill(scaled == -math.inf, math.inf).amin(-1).double()
        first_id = torch.zeros_like(self._first_id[rows])
        truncated = (self._top_p[rows] < 1).nonzero()[:, 0] if self._any_top_p else ()
        if len(truncated):
            nucleus = _Nucleus(
                scaled=scaled[truncated],
                top_p=self._top_p[rows][truncated],
                target_ids=self._target_ids[rows][truncated],
            )
            edge, first_id[truncated] = nucleus.edge(CANDIDATES)
            lowest[truncated] = edge.double()
            self._any_tie |= bool(first_id.any())
        self._lowest[rows], self._first_id[rows] = lowest, first_id

    def exclude(self, logits: Tensor, rows: slice, first_column: int) -> None:
        scaled = self._scaled(logits, rows)
        lowest = self._lowest[rows].to(scaled.dtype).unsqueeze(-1)
        # NaN is below nothing, so it stays.
        outside = scaled < lowest
        if self._any_tie:
            ids = torch.arange(first_column, first_column + logits.shape[-1], device=logits.device)
            is_early = ids < self._first_id[rows].unsqueeze(-1)
            outside |= (scaled == lowest) & is_early & (ids != self._target_ids[rows].unsqueeze(-1))
        logits.masked_fill_(outside, -math.inf)

    def _scaled(self, logits: Tensor, rows: slice) -> Tensor:
        dtype = compute_dtype(logits)
        return logits.to(dtype) / self._temperature[rows].to(dtype).unsqueeze(-1)


class _Listed(_KeptSets):
    """Sets by member."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids

    def exclude(self, logits: Tensor, rows: slice, first_column: int) -> None:
        width = logits.shape[-1]
        column = self._ids[rows] - first_column
        # Members of other tiles, and what fills a row, go to a column of their own.
        column = torch.where((column >= 0) & (column < width), column, width)
        inside = torch.zeros(len(logits), width + 1, dtype=torch.bool, device=logits.device)
        inside.scatter_(1, column, True)
        logits.masked_fill_(~inside[:, :width] & (logits < math.inf), -math.inf)


def _exclude_improbable(scaled: Tensor, min_p: Tensor) -> None:
    """min_p of [n, V] logits over temperature, in place."""
    probabilities = scaled.softmax(-1)
    least = probabilities.amax(-1) * min_p.to(scaled.dtype)
    scaled.masked_fill_(probabilities < least.unsqueeze(-1), -math.inf)


def _exclude_beyond_top_k(scaled: Tensor, top_k: Tensor, largest_k: int) -> None:
    """top_k of [n, V] logits over temperature, in place; all that equal the k-th stay."""
    vocab_size = scaled.shape[-1]
    best = scaled.topk(min(largest_k, vocab_size)).values
    kth = best.gather(-1, (top_k - 1).clamp(0, best.shape[-1] - 1).unsqueeze(-1))
    is_off = (top_k == 0) | (top_k >= vocab_size)
    scaled.masked_fill_((scaled < kth) & ~is_off.unsqueeze(-1), -math.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Nucleus:
    """What top_p keeps of n rows."""

    scaled: Tensor
    """[n, V] logits over temperature, -inf where another rule has excluded."""
    top_p: Tensor
    """[n] float64."""
    target_ids: Tensor
    """[n] int64."""

    def edge(self, num_candidates: int) -> tuple[Tensor, Tensor]:
        """[n] the lowest logit that is kept; [n] int64 the id from which on those equal to it are.

        A token is kept where the probabilities before it, in falling order, sum to less than p: vLLM adds
        them from the other end, and removes what sums to at most 1 - p.
        """
        vocab_size = self.scaled.shape[-1]
        best = self.scaled.topk(min(num_candidates, vocab_size)).values
        mass = (best - self.scaled.logsumexp(-1, keepdim=True)).double().exp()
        before = mass.cumsum(-1) - mass
        # What min_p or top_k excluded stays out, though a rounded sum may never reach p. At least one is
        # kept: NaN, which is less than nothing, is then the edge, excludes nothing, and is seen.
        num_kept = ((before < self.top_p.unsqueeze(-1)) & (best > -math.inf)).sum(-1).clamp_(min=1)
        lowest = best.gather(-1, num_kept.unsqueeze(-1) - 1)
        first_id = self._first_id(lowest, num_kept - (best > lowest).sum(-1))
        lowest = lowest.squeeze(-1)
        beyond = (num_kept == best.shape[-1]).nonzero()[:, 0]
        if len(beyond) and best.shape[-1] < vocab_size:
            lowest[beyond], first_id[beyond] = self._part(beyond).edge(vocab_size)
        return lowest, first_id

    def _part(self, rows: Tensor) -> "_Nucleus":
        return _Nucleus(scaled=self.scaled[rows], top_p=self.top_p[rows], target_ids=self.target_ids[rows])

    def _first_id(self, lowest: Tensor, num_kept: Tensor) -> Tensor:
        """[n]; of those equal to `lowest` [n, 1] `num_kept` [n] are kept: the last, the target among them."""
        equal = self.scaled == lowest
        num_removed = equal.sum(-1) - num_kept
        first_id = torch.zeros_like(num_removed)
        tied = (num_removed > 0).nonzero()[:, 0]
        if len(tied):
            rank, targets = equal[tied].cumsum(-1), self.target_ids[tied].unsqueeze(-1)
            most = num_removed[tied].unsqueeze(-1)
            # An early target takes the place of one of the last.
            is_early = equal[tied].gather(-1, targets) & (rank.gather(-1, targets) <= most)
            # Beyond the last column where the target is all that is kept.
            is_kept = torch.nn.functional.pad(rank > most + is_early, (0, 1), value=True)
            first_id[tied] = is_kept.int().argmax(-1)
        return first_id


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """One number of a `Truncation`."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    """Of a tensor of them."""
    column: torch.dtype
    """What they are computed in."""
    holds: Callable[[Tensor], Tensor]
    """[N] values -> [N], True where in range."""
    expected: str


_RULES = (
    _Rule(
        name="top_k",
        dtypes=ID_DTYPES,
        column=torch.int64,
        holds=lambda value: value >= 0,
        expected="0 (off) or above",
    ),
    _Rule(
        name="top_p",
        dtypes=LOGPROB_DTYPES,
        column=torch.float64,
        holds=lambda value: (value > 0) & (value <= 1),
        expected="above 0 and at most 1 (off)",
    ),
    _Rule(
        name="min_p",
        dtypes=LOGPROB_DTYPES,
        column=torch.float64,
        holds=lambda value: (value >= 0) & (value <= 1),
        expected="from 0 (off) to 1",
    ),
)


def _column(rule: _Rule, value: object, trained: Trained, like: tuple[str, Tensor]) -> Tensor:
    """[N], each in its range."""
    name, device = f"kept.{rule.name}", like[1].device
    if isinstance(value, Tensor):
        require_tensor(name, value, rule.dtypes)
        require_shape(name, value, trained.shape, f"a number, or the leading axes of {like[0]}")
        require_device(name, value, device, like[0])
        values = value.detach().unsqueeze(0)[trained.where].to(rule.column)
    else:
        is_whole = rule.column is torch.int64
        if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
            wanted = "an int" if is_whole else "a float"
            raise DtypeError(f"{name}: found {type(value).__name__} {value!r}, expected {wanted} or a tensor")
        values = torch.full((trained.num_tokens,), value, dtype=rule.column, device=device)
        if not bool(rule.holds(torch.tensor(value, dtype=rule.column))):
            raise ScaleError(f"{name}: found {value!r}, expected {rule.expected}")
    in_range = rule.holds(values)
    if not bool(in_range.all()):
        found = offenders(trained, ~in_range, values, rule.name)
        raise ScaleError(f"{name}: found {found}; expected {rule.expected} at every trained position")
    return values


def _members(ids: object, trained: Trained, vocab_size: int, like: tuple[str, Tensor]) -> Tensor:
    """[N, K] int64, each in the vocabulary or `NO_ID`, and not that alone."""
    require_tensor("kept.ids", ids, ID_DTYPES)
    if not isinstance(ids, Tensor) or ids.shape[:-1] != trained.shape or ids.dim() == 0:
        shape = list(ids.shape) if isinstance(ids, Tensor) else ids
        raise ShapeError(
            f"kept.ids: found shape {shape}, expected [{', '.join(map(str, [*trained.shape, 'K']))}] "
            f"(the leading axes of {like[0]})"
        )
    require_device("kept.ids", ids, like[1].device, like[0])
    members = ids.unsqueeze(0)[trained.where].to(torch.int64)
    outside = (members != NO_ID) & ((members < 0) | (members >= vocab_size))
    if bool(outside.any()):
        row = outside.any(-1)
        worst = torch.where(outside, members, NO_ID).gather(-1, outside.int().argmax(-1, keepdim=True))
        found = offenders(trained, row, worst.squeeze(-1), "id")
        raise TokenRangeError(f"kept.ids: found {found}; expected 0 <= id < {vocab_size} (V), or {NO_ID}")
    empty = (members == NO_ID).all(-1)
    if bool(empty.any()):
        found = offenders(trained, empty, torch.zeros_like(trained.target_ids), "size")
        raise ShapeError(f"kept.ids: found {found}; expected an id at every trained position")
    return members
