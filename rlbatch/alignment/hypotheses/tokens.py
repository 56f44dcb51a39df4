"""Single tokens that are off in a turn that is not: wrong ids, or an engine that was sure of the unlikely."""

import numpy as np
import torch
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.limits import (
    CONFIDENT_BELOW,
    CONFIDENT_MIN_SHARE,
    CONFIDENT_MIN_TOKENS,
    CONFIDENT_OFF,
    SLOT_AFTER,
    SLOT_CHANCE,
    SLOT_FACTOR,
    SLOT_FIT,
    SLOT_MOST,
    SLOT_NOISY,
    SLOT_NOISY_CHANCE,
    SLOT_NOISY_MIN,
    SLOT_OFF,
    SLOT_TRAINER,
    SLOT_WIDTHS,
    SPAN_QUIET,
)
from rlbatch.alignment.tournament import widths
from rlbatch.catalogue import finding
from rlbatch.errors import Finding


def wrong_ids(evidence: Evidence) -> Finding | None:
    """At a few slots the engine's value is that of another id, which the trainer finds as likely."""
    slots = _slots(evidence)
    if evidence.ask is None or not len(slots) or not evidence.comparable:
        return None
    rest = evidence.usable.copy()
    for slot in slots:
        rest[slot : slot + SLOT_AFTER] = False
    noise = float(evidence.at_zero()[rest].mean()) if rest.any() else np.inf
    if noise > min(SPAN_QUIET, evidence.most_left):
        return None
    # An uncertain token is told less exactly: noise moves it more.
    within = SLOT_WIDTHS * float((evidence.at_zero()[rest] / widths(evidence.trainer[rest])).mean())
    chances = np.array([_chance(evidence, int(slot), within) for slot in slots])
    # What follows a wrong id is unlikely too, and no other id explains it.
    first = np.diff(slots, prepend=-SLOT_AFTER - 1) > SLOT_AFTER
    if noise > SLOT_NOISY and first.sum() < SLOT_NOISY_MIN:
        return None
    most = SLOT_NOISY_CHANCE if noise > SLOT_NOISY else SLOT_CHANCE
    if chances[first].prod() > most or (chances[first] == 1).any():
        return None
    slots = slots[chances < 1]
    tokens = ", ".join(str(evidence.first_token + int(slot)) for slot in slots[:8])
    log_ratio = evidence.log_ratio()
    return finding(
        "wrong-ids",
        where=evidence.where(slots),
        expected="the engine's logprob of the id that is stored",
        found=f"at tokens {tokens}{', ...' if len(slots) > 8 else ''} the trainer is "
        f"{-log_ratio[slots].mean():.3g} nats lower, and another id has the engine's value; elsewhere in the "
        f"turn mean |log_ratio| is {noise:.3g}",
    )


def _slots(evidence: Evidence) -> NDArray[np.intp]:
    """Isolated tokens that the trainer holds to be far less likely than the engine did."""
    usable = evidence.usable
    log_ratio = evidence.log_ratio()
    low = usable & (log_ratio < -SLOT_OFF) & (evidence.trainer < SLOT_TRAINER)
    rest = np.abs(log_ratio[usable & ~low])
    if not len(rest) or low.sum() > SLOT_MOST * usable.sum():
        return np.array([], np.intp)
    return np.flatnonzero(low & (log_ratio < -SLOT_FACTOR * rest.mean()))


def _chance(evidence: Evidence, slot: int, within: float) -> float:
    """How easily some id has the engine's value there by chance; 1 where none of the first ranks has.

    Args:
        evidence: with logits to ask for.
        slot: its entry.
        within: noise in widths.
    """
    if evidence.ask is None:
        return 1.0
    logits = evidence.ask(slot, slot + 1)[0].double() / evidence.divisor
    best = torch.log_softmax(logits, dim=0).topk(min(MOST_RANKS, len(logits))).values.numpy()
    apart = np.abs(best - float(evidence.inference[slot]))
    # An uncertain token is told less exactly: noise moves it more.
    tolerance = within * widths(best) + SLOT_FIT
    if not (apart < tolerance).any():
        return 1.0
    nearest = int(apart.argmin())
    return float(min(0.99, np.count_nonzero(apart < 1.0) * tolerance[nearest]))


MOST_RANKS = 256
"""Ids a position among which the drawn one is looked for."""


def confident_disagreement(evidence: Evidence) -> Finding | None:
    """The engine was sure of tokens that the trainer holds to be unlikely, more often than noise has it."""
    if not evidence.current or not evidence.comparable:
        return None
    usable, log_ratio = evidence.usable, evidence.log_ratio()
    sure = usable & (evidence.inference >= CONFIDENT_BELOW) & (log_ratio < -CONFIDENT_OFF)
    bad = np.flatnonzero(sure)
    if len(bad) < max(CONFIDENT_MIN_TOKENS, CONFIDENT_MIN_SHARE * usable.sum()):
        return None
    rest = evidence.at_zero()[usable & ~sure]
    if not len(rest) or rest.mean() > min(SPAN_QUIET, evidence.most_left):
        return None
    ask = "" if evidence.ask is not None else "; whether other ids fit takes logits_for"
    return finding(
        "confident-disagreement",
        where=evidence.where(bad),
        expected="tokens that the engine gave 1/2 or more within 2 nats of it in the trainer",
        found=f"{len(bad)} of {int(usable.sum())} tokens lower, by {-log_ratio[bad].mean():.3g} nats "
        f"on average; elsewhere in the turn mean |log_ratio| is {rest.mean():.3g}{ask}",
    )
