"""`Exhibit`: a stretch of one segment with everything that families of distributions predict for it.

Made from logits where somebody gives them, a window at a time, and small enough to be kept: what a pool of
segments is judged by. Decides nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.families import FAMILIES
from rlbatch.alignment.logits import WINDOW_TOKENS, require_finite, require_same_rows
from rlbatch.alignment.seen import Seen
from rlbatch.alignment.subtle_limits import AGAIN_MEAN, LOOK_ELEMENTS, RESTLESS_SHARE
from rlbatch.errors import Where
from rlbatch_kernels import RESIDUAL_CLIP, token_logprobs

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exhibit:
    """n usable tokens of one segment."""

    place: Where
    divisor: float
    offset: NDArray[np.int64]
    """[n] which token of its turn each is."""
    index: int
    """Of its sequence in the pack; -1 where the batch is not packed."""
    inference: Values
    """[n] nats."""
    trainer: Values
    """[n] nats, as passed to the gate."""
    again: Values | None
    """[n] nats, of the logits asked for: a second pass of the trainer; None where nobody was asked."""
    third: Values | None
    """[n] the same of a third pass; `again` where that agrees with the trainer, and none was needed."""
    own_position: Values | None
    """[n] nats, of the logits one position later, as without causal shift; NaN at the end."""
    next_id: Values | None
    """[n] nats, of the next token under the own logits, as shifted twice; NaN at the end."""
    target_logits: Values | None
    """[n] logit of each token over the temperature."""
    collision: Values | None
    """[n] sum over the vocabulary of squared probabilities: 1 where the trainer is certain of one token."""
    predictions: tuple[Values | None, ...]
    """[n, P] nats, one of each of `FAMILIES`; None where it takes logits that nobody gave."""

    @property
    def is_restless(self) -> bool:
        """Whether two passes over the same tokens differ about as much as the values passed do from one."""
        if self.again is None or self.third is None:
            return False
        apart = _mean(self.third - self.again)
        return apart >= max(AGAIN_MEAN, RESTLESS_SHARE * _mean(self.trainer - self.again))

    @property
    def stated(self) -> Values:
        """[n] what the engine should have reported, by the trainer's second pass where there is one."""
        return self.trainer if self.again is None else self.again


Window: TypeAlias = tuple[Exhibit | None, int]
"""The exhibit of one window, None without a usable token; and the vocabulary's size, 0 without logits."""


def exhibit_of(
    evidence: Evidence,
    *,
    max_tokens: int,
    is_enough: Callable[[Exhibit], bool] = lambda _: False,
    is_kept: bool = False,
) -> Exhibit | None:
    """The first `max_tokens` of the evidence, or as many as the vocabulary allows; None where none is usable.

    Args:
        evidence: of one segment.
        max_tokens: to look at.
        is_enough: asked of what there is before a further window is looked at.
        is_kept: the caller keeps the exhibit, so that the evidence may hold it too.

    Raises:
        AlignmentError: `batch-mismatch`, where the logits asked for are not those of the segment.
    """
    parts: list[Exhibit] = []
    stop = min(len(evidence.trained), max_tokens)
    for start in range(0, stop, WINDOW_TOKENS):
        span = (start, min(start + WINDOW_TOKENS, stop))
        window = evidence.windows.get(span) or _window(evidence.part(*span), start)
        if is_kept:
            evidence.windows[span] = window
        made, vocab_size = window
        parts += [made] if made is not None else []
        if (start + WINDOW_TOKENS) * vocab_size > LOOK_ELEMENTS:
            break
        if start + WINDOW_TOKENS < stop and parts and is_enough(joined(parts)):
            break
    if not parts:
        return None
    whole = joined(parts)
    # A trainer that gives something else each time speaks of the rows asked for all the same.
    if whole.again is not None and not whole.is_restless:
        require_same_rows(whole.again, whole.trainer, whole.inference, place=whole.place)
    return whole


def joined(parts: Sequence[Exhibit]) -> Exhibit:
    """All tokens of several, in order, at the place and the index of the first."""
    first = parts[0]

    def column(name: str) -> Values | None:
        values = [getattr(part, name) for part in parts]
        return None if any(each is None for each in values) else np.concatenate(values)

    return Exhibit(
        place=first.place,
        divisor=first.divisor,
        offset=np.concatenate([part.offset for part in parts]),
        index=first.index,
        inference=np.concatenate([part.inference for part in parts]),
        trainer=np.concatenate([part.trainer for part in parts]),
        again=column("again"),
        third=column("third"),
        own_position=column("own_position"),
        next_id=column("next_id"),
        target_logits=column("target_logits"),
        collision=column("collision"),
        predictions=tuple(
            None
            if any(part.predictions[at] is None for part in parts)
            else np.concatenate([part.predictions[at] for part in parts if part.predictions[at] is not None])
            for at in range(len(FAMILIES))
        ),
    )


def _window(part: Evidence, start: int) -> Window:
    usable = part.usable
    if not usable.any():
        return None, 0
    logits = None if part.ask is None else part.ask(0, len(part.trained))
    again = third = own = after = target = None
    if logits is not None:
        ids = torch.from_numpy(part.ids)
        again = require_finite(_logprobs(logits, ids, part.divisor), place=part.place)
        target = logits.gather(1, ids[:, None])[:, 0].double().numpy() / part.divisor
        own = np.append(_logprobs(logits[1:], ids[:-1], part.divisor), np.nan)
        after = np.append(_logprobs(logits[:-1], ids[1:], part.divisor), np.nan)
        third = again if _mean((part.trainer - again)[usable]) < AGAIN_MEAN else second_pass(part)
    stated = np.where(usable, part.trainer, 0.0) if again is None else again
    first = part.first_token
    seen = Seen(
        stated=stated,
        divisor=part.divisor,
        ids=part.ids,
        logits=logits,
        before=part.context.ids[:first],
        num_sampled_before=start,
    )
    predictions = tuple(
        None if logits is None and family.needs_logits else family.predict(seen, family.parameters)[usable]
        for family in FAMILIES
    )
    return Exhibit(
        place=part.place,
        divisor=part.divisor,
        offset=start + np.flatnonzero(usable),
        index=part.context.index if part.context.is_packed else -1,
        inference=part.inference[usable],
        trainer=part.trainer[usable],
        again=None if again is None else again[usable],
        third=None if third is None else third[usable],
        own_position=None if own is None else own[usable],
        next_id=None if after is None else after[usable],
        target_logits=None if target is None else target[usable],
        collision=None if logits is None else seen.collision[usable],
        predictions=predictions,
    ), 0 if logits is None else int(logits.shape[1])


def second_pass(evidence: Evidence) -> Values:
    """[N] nats, of the logits that somebody gives for all of the evidence: at most `WINDOW_TOKENS`."""
    if evidence.ask is None:
        raise ValueError("nobody gives logits")
    logits = evidence.ask(0, len(evidence.trained))
    again = _logprobs(logits, torch.from_numpy(evidence.ids), evidence.divisor)
    return require_finite(again, place=evidence.place)


def _mean(differences: Values) -> float:
    return float(np.minimum(np.abs(differences), RESIDUAL_CLIP).mean())


def _logprobs(logits: Tensor, ids: Tensor, divisor: float) -> Values:
    """[n] nats, of ids under the logits [n, V] over the divisor."""
    trained = torch.ones(len(ids), dtype=torch.bool)
    logprobs: Values = token_logprobs(logits, ids, temperature=divisor, mask=trained).double().numpy()
    return logprobs
