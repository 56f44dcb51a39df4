"""Single tokens that are off in a turn that is not: wrong ids, or an engine that was sure of the unlikely."""

import numpy as np
import torch
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.subtle_limits import (
    AFTERMATH_FACTOR,
    AFTERMATH_TOKENS,
    AFTERMATH_WIDTHS,
    CONFIDENT_BELOW,
    CONFIDENT_MIN_SHARE,
    CONFIDENT_MIN_TOKENS,
    CONFIDENT_OFF,
    SLOT_AFTER,
    SLOT_BEFORE,
    SLOT_CHANCE,
    SLOT_FACTOR,
    SLOT_FIT,
    SLOT_MOST,
    SLOT_NOISY,
    SLOT_NOISY_MIN,
    SLOT_OFF,
    SLOT_TRAINER,
    SLOT_WIDTHS,
    SPAN_QUIET,
)
from rlbatch.alignment.tournament import WIDTH_FLOOR, widths
from rlbatch.catalogue import finding
from rlbatch.errors import Finding


def wrong_ids(evidence: Evidence) -> Finding | None:
    """At a few slots the engine's value is that of another id, which the trainer finds as likely."""
    slots = _slots(evidence)
    if evidence.ask is None or not len(slots) or not evidence.comparable:
        return None
    rest = _apart_from(evidence, slots)
    noise = float(evidence.at_zero()[rest].mean()) if rest.any() else np.inf
    if noise > min(SPAN_QUIET, evidence.most_left):
        return None
    if noise > SLOT_NOISY and not evidence.current:
        # Newer weights have moved single tokens by as much, and what follows them with them.
        return None
    before = evidence.usable & (np.arange(len(rest)) < slots[0])
    exact = before if before.sum() >= SLOT_BEFORE else rest
    chances = np.array([_chance(evidence, int(at), rest if at > slots[0] else exact) for at in slots])
    # What follows a wrong id is unlikely too, and no other id explains it.
    first = np.diff(slots, prepend=-SLOT_AFTER - 1) > SLOT_AFTER
    if noise > SLOT_NOISY:
        # No id is told exactly there: several must fit, and spoil what follows them.
        holds = (
            first.sum() >= SLOT_NOISY_MIN and (chances[first] < 1).all() and has_aftermath(evidence, slots)
        )
        slots = slots[first]
    else:
        holds = chances[0] <= SLOT_CHANCE
        slots = slots[chances <= SLOT_CHANCE]
    if not holds:
        return None
    tokens = ", ".join(str(evidence.first_token + int(slot)) for slot in slots[:8])
    return finding(
        "wrong-ids",
        where=evidence.where(slots),
        expected="the engine's logprob of the id that is stored",
        found=f"at tokens {tokens}{', ...' if len(slots) > 8 else ''} the trainer is "
        f"{-evidence.log_ratio()[slots].mean():.3g} nats lower, and another id has the engine's value; what "
        f"comes right after them cannot be told; elsewhere in the turn mean |log_ratio| is {noise:.3g}",
    )


def has_aftermath(evidence: Evidence, bad: NDArray[np.intp]) -> bool:
    """Whether tokens right after bad ones are louder than others: the trainer has read another id there."""
    rest = _apart_from(evidence, bad)
    # What lies shortly after a bad token may be bad itself: that is what an aftermath is.
    leads = bad[np.diff(bad, prepend=-AFTERMATH_TOKENS - 1) > AFTERMATH_TOKENS]
    reached = np.unique(leads[:, None] + np.arange(1, AFTERMATH_TOKENS + 1))
    after = np.zeros(len(rest), bool)
    after[reached[reached < len(rest)]] = True
    after &= evidence.usable
    if rest.any() and evidence.at_zero()[rest].mean() <= SLOT_NOISY:
        # Without noise the others there say it clearly, and two bad tokens may be neighbours by chance.
        after[bad] = False
    if not after.any() or not rest.any():
        return False
    scaled = evidence.at_zero() / widths(np.where(evidence.usable, evidence.trainer, 0.0))
    most = AFTERMATH_WIDTHS * max(float(scaled[rest].mean()), WIDTH_FLOOR)
    loud, usual = (float(np.minimum(scaled[part], most).mean()) for part in (after, rest))
    return loud >= AFTERMATH_FACTOR * usual + WIDTH_FLOOR


def _apart_from(evidence: Evidence, bad: NDArray[np.intp]) -> NDArray[np.bool_]:
    """[N]; usable tokens that no bad one is among or shortly before."""
    rest = evidence.usable.copy()
    for slot in bad:
        rest[slot : slot + SLOT_AFTER] = False
    return rest


def _slots(evidence: Evidence) -> NDArray[np.intp]:
    """Isolated tokens that the trainer holds to be far less likely than the engine did."""
    usable = evidence.usable
    log_ratio = evidence.log_ratio()
    low = usable & (log_ratio < -SLOT_OFF) & (evidence.trainer < SLOT_TRAINER)
    rest = np.abs(log_ratio[usable & ~low])
    if not len(rest) or low.sum() > SLOT_MOST * usable.sum():
        return np.array([], np.intp)
    return np.flatnonzero(low & (log_ratio < -SLOT_FACTOR * rest.mean()))


def _chance(evidence: Evidence, slot: int, known: NDArray[np.bool_]) -> float:
    """How easily some id has the engine's value there by chance; 1 where none has.

    Args:
        evidence: with logits to ask for.
        slot: its entry.
        known: [N] tokens by which noise is known.
    """
    if evidence.ask is None:
        return 1.0
    # An uncertain token is told less exactly: noise moves it more.
    noise = float((evidence.at_zero()[known] / widths(evidence.trainer[known])).mean())
    logits = evidence.ask(slot, slot + 1)[0].double() / evidence.divisor
    best = torch.log_softmax(logits, dim=0).numpy()
    apart = np.abs(best - float(evidence.inference[slot]))
    tolerance = SLOT_WIDTHS * noise * widths(best) + SLOT_FIT
    if not (apart < tolerance).any():
        return 1.0
    nearest = int(apart.argmin())
    return float(min(0.99, np.count_nonzero(apart < 1.0) * tolerance[nearest]))


def confident_disagreement(evidence: Evidence) -> Finding | None:
    """The engine was sure of tokens that the trainer holds to be unlikely, more often than noise has it."""
    if not evidence.current or not evidence.comparable:
        return None
    usable, log_ratio = evidence.usable, evidence.log_ratio()
    sure = usable & (evidence.inference >= CONFIDENT_BELOW) & (log_ratio < -CONFIDENT_OFF)
    bad = np.flatnonzero(sure)
    rest = evidence.at_zero()[usable & ~sure]
    if len(bad) < CONFIDENT_MIN_TOKENS or not len(rest):
        return None
    noise = float(rest.mean())
    if noise > min(SPAN_QUIET, evidence.most_left):
        return None
    if noise > SLOT_NOISY and len(bad) < CONFIDENT_MIN_SHARE * usable.sum():
        return None
    count = f"{len(bad)} of {int(usable.sum())} tokens lower, by {-log_ratio[bad].mean():.3g} nats on average"
    ask = "" if evidence.ask is not None else "; whether other ids fit takes logits_for"
    # A kernel that is wrong for some tokens spares the next ones; after a wrong id they are off as well.
    spreads = has_aftermath(evidence, bad)
    return finding(
        "unexplained" if spreads else "confident-disagreement",
        severity="error",
        where=evidence.where(bad),
        expected="tokens that the engine gave 1/2 or more within 2 nats of it in the trainer",
        found=f"{count}; elsewhere in the turn mean |log_ratio| is {noise:.3g}"
        + ("; what follows them is off too, as after wrong ids" if spreads else "")
        + ask,
    )
