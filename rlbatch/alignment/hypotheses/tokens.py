"""Single tokens that are off in a turn that is not: wrong ids, or an engine that was sure of the unlikely."""

import numpy as np
import torch
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.limits import LAG_VOTE
from rlbatch.alignment.subtle_limits import (
    CONFIDENT_BELOW,
    CONFIDENT_FACTOR,
    CONFIDENT_MIN_SHARE,
    CONFIDENT_MIN_TOKENS,
    CONFIDENT_MOST_SHARE,
    CONFIDENT_NEARLY,
    CONFIDENT_NEARLY_SHARE,
    CONFIDENT_OFF,
    SLOT_AFTER,
    SLOT_BEFORE,
    SLOT_CHANCE,
    SLOT_FACTOR,
    SLOT_FIT,
    SLOT_LATER_CHANCE,
    SLOT_MOST,
    SLOT_NOISY,
    SLOT_OFF,
    SLOT_QUIET_MOST,
    SLOT_QUIET_OFF,
    SLOT_QUIET_TRAINER,
    SLOT_STANDS_OUT,
    SLOT_TRAINER,
    SLOT_WIDTHS,
    SPAN_QUIET,
    UNSURE_BELOW,
    WAKE_ERROR,
    WAKE_LEAST,
    WAKE_NOISE,
    WAKE_PLACE,
    WAKE_POWER,
    WAKE_SURE,
    WAKE_TOKENS,
)
from rlbatch.alignment.tournament import WIDTH_FLOOR, widths
from rlbatch.catalogue import finding
from rlbatch.errors import Finding


def wrong_ids(evidence: Evidence) -> Finding | None:
    """At a few slots the engine's value is that of another id, and what follows them is off as well."""
    if evidence.ask is None or not evidence.comparable:
        return None
    # Where everything before is exact, what is off by less than a wild token is a slot too.
    slots = _slots(evidence, off=SLOT_QUIET_OFF, trainer=SLOT_QUIET_TRAINER)
    noise = _noise(evidence, slots)
    if noise > SLOT_NOISY or len(slots) > SLOT_QUIET_MOST:
        slots = _slots(evidence)
        noise = _noise(evidence, slots)
    is_quiet = noise <= SLOT_NOISY
    if is_quiet and not _stand_out(evidence, slots):
        return None
    # Newer weights have moved single tokens by as much, and what follows them with them.
    if not len(slots) or noise > WAKE_NOISE or not (is_quiet or evidence.current):
        return None
    # What follows a wrong id is unlikely too, and no other id explains it.
    first = np.diff(slots, prepend=-SLOT_AFTER - 1) > SLOT_AFTER
    later = max(noise, _noise_after(evidence, slots))
    chances = np.array([_chance(evidence, int(at), later if at > slots[0] else noise) for at in slots[first]])
    own, wake = _surprise(evidence, slots, slots[first], noise, is_quiet=is_quiet)
    sure = float((own - WAKE_PLACE).sum()) + wake
    has_wake = wake >= WAKE_LEAST * len(own) and sure >= WAKE_SURE and (chances < 1).mean() >= 0.5
    if not has_wake and not (is_quiet and chances[0] <= SLOT_CHANCE):
        return None
    told = slots[first]
    if is_quiet:
        told = told[(chances <= SLOT_LATER_CHANCE) | (np.arange(len(told)) == 0)]
    tokens = ", ".join(str(evidence.first_token + int(slot)) for slot in told[:8])
    return finding(
        "wrong-ids",
        severity="error" if is_quiet or sure >= WAKE_ERROR else "warning",
        where=evidence.where(told),
        expected="the engine's logprob of the id that is stored",
        found=f"at tokens {tokens}{', ...' if len(told) > 8 else ''} the trainer is "
        f"{-evidence.log_ratio()[told].mean():.3g} nats lower, and another id has the engine's value; what "
        f"comes right after them cannot be told; before them the noise is {noise:.2g} of a token's width",
    )


def _noise(evidence: Evidence, slots: NDArray[np.intp]) -> float:
    """Mean |difference| in widths, without the largest tenth, of unsure tokens before the first slot.

    Where they are too few: of those apart from slots, or what is usual in the batch, whichever is more.
    """
    if not len(slots):
        return np.inf
    usable = evidence.usable
    lower = np.minimum(evidence.trainer, evidence.inference, where=usable, out=np.zeros(len(usable)))
    unsure = lower < UNSURE_BELOW
    scaled = evidence.at_zero() / widths(np.where(usable, evidence.trainer, 0.0))
    before = unsure & (np.arange(len(usable)) < slots[0])
    if before.sum() >= SLOT_BEFORE:
        return max(_trimmed(scaled[before]), WIDTH_FLOOR)
    apart = unsure & _apart_from(evidence, slots)
    known = [_trimmed(scaled[apart])] if apart.sum() >= SLOT_BEFORE else []
    known += [] if evidence.floor is None else [evidence.floor]
    return max(*known, WIDTH_FLOOR) if known else np.inf


def _stand_out(evidence: Evidence, slots: NDArray[np.intp]) -> bool:
    """Whether the first slot is far louder than unsure tokens after it: other weights spoil all of them."""
    later = _apart_from(evidence, slots) & (np.arange(len(evidence.trained)) > slots[0])
    later &= np.minimum(evidence.trainer, evidence.inference) < UNSURE_BELOW
    rest = evidence.at_zero()[later]
    return not len(rest) or abs(evidence.log_ratio()[slots[0]]) >= SLOT_STANDS_OUT * float(rest.mean())


def _noise_after(evidence: Evidence, slots: NDArray[np.intp]) -> float:
    """The same of all tokens after the first slot that are apart from slots; 0 where there are none."""
    after = _apart_from(evidence, slots) & (np.arange(len(evidence.trained)) > slots[0])
    scaled = evidence.at_zero()[after] / widths(evidence.trainer[after])
    return _trimmed(scaled) if len(scaled) > 1 else 0.0


def _trimmed(values: NDArray[np.float64]) -> float:
    return float(np.sort(values)[: len(values) - max(1, len(values) // 10)].mean())


def _surprise(
    evidence: Evidence,
    slots: NDArray[np.intp],
    first: NDArray[np.intp],
    noise: float,
    *,
    is_quiet: bool,
) -> tuple[NDArray[np.float64], float]:
    """How little noise would do what is seen at the first slots, and right after each of them; nats.

    The tails of noise are those of a power: a token that is x times the noise off is said 2.2 ln x nats.
    """
    off = np.abs(evidence.log_ratio()) / widths(np.where(evidence.usable, evidence.trainer, 0.0))
    nats = WAKE_POWER * np.log(np.maximum(off / noise, 1.0))
    wake = np.zeros(len(nats), bool)
    reached = (slots if is_quiet else first)[:, None] + np.arange(1, WAKE_TOKENS + 1)
    wake[reached[reached < len(wake)]] = True
    if is_quiet:
        # Without noise the others say it clearly, and two bad tokens may be neighbours by chance.
        wake[slots] = False
    # A nat each is what noise leaves.
    return nats[first], float((nats - 1.0)[wake & evidence.usable].sum())


def _apart_from(evidence: Evidence, bad: NDArray[np.intp]) -> NDArray[np.bool_]:
    """[N]; usable tokens that no bad one is among or shortly before."""
    rest = evidence.usable.copy()
    for slot in bad:
        rest[slot : slot + SLOT_AFTER] = False
    return rest


def _slots(evidence: Evidence, *, off: float = SLOT_OFF, trainer: float = SLOT_TRAINER) -> NDArray[np.intp]:
    """Isolated tokens that are far off, which the trainer holds to be unlikely."""
    usable, apart = evidence.usable, np.abs(evidence.log_ratio())
    # Noise makes what was drawn likelier now and then; by as much as a wild token it makes it unlikely only.
    low = usable & (evidence.trainer < trainer) & (apart > off)
    if off >= SLOT_OFF:
        low &= evidence.log_ratio() < 0
    rest = evidence.at_zero()[usable & ~low]
    if not len(rest) or low.sum() > SLOT_MOST * usable.sum():
        return np.array([], np.intp)
    return np.flatnonzero(low & (apart > SLOT_FACTOR * rest.mean()))


def _chance(evidence: Evidence, slot: int, noise: float) -> float:
    """How easily some id has the engine's value there by chance; 1 where none has.

    Args:
        evidence: with logits to ask for.
        slot: its entry.
        noise: of the turn, in widths: an uncertain token is told less exactly.
    """
    if evidence.ask is None:
        return 1.0
    logits = evidence.ask(slot, slot + 1)[0].double() / evidence.divisor
    best = torch.log_softmax(logits, dim=0).numpy()
    if abs(best[evidence.ids[slot]] - evidence.trainer[slot]) > LAG_VOTE:
        # What was passed is not what the trainer's logits say: it is no matter of ids.
        return 1.0
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
    nearly = usable & ~sure & (log_ratio < -CONFIDENT_NEARLY)
    by_noise = usable.sum() * (noise / CONFIDENT_OFF) ** WAKE_POWER
    if np.count_nonzero(nearly) > CONFIDENT_NEARLY_SHARE * len(bad) or len(bad) < CONFIDENT_FACTOR * by_noise:
        return None
    if len(bad) > CONFIDENT_MOST_SHARE * usable.sum():
        return None
    count = f"{len(bad)} of {int(usable.sum())} tokens lower, by {-log_ratio[bad].mean():.3g} nats on average"
    ask = "" if evidence.ask is not None else "; whether other ids fit takes logits_for"
    # A kernel that is wrong for some tokens spares the next ones; after a wrong id they are off as well.
    first = bad[np.diff(bad, prepend=-SLOT_AFTER - 1) > SLOT_AFTER]
    near = _noise(evidence, bad)
    _, wake = _surprise(evidence, bad, first, near, is_quiet=near <= SLOT_NOISY)
    spreads = wake >= WAKE_LEAST * len(first)
    return finding(
        "unexplained" if spreads else "confident-disagreement",
        severity="error",
        where=evidence.where(bad),
        expected="tokens that the engine gave 1/2 or more within 2 nats of it in the trainer",
        found=f"{count}; elsewhere in the turn mean |log_ratio| is {noise:.3g}"
        + ("; what follows them is off too, as after wrong ids" if spreads else "")
        + ask,
    )
