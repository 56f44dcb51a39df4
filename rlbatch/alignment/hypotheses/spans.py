"""One end of a turn is off and the rest is not: which end, how far, and where it stops tell the cause."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.limits import GROSS_TRIMMED_SHARE, OUTLIER_TOKEN, ZERO_NOISY
from rlbatch.alignment.subtle_limits import (
    CACHE_BLOCK,
    CACHE_MIN_TOKENS,
    DECAY_FACTOR,
    RUBBISH_MEAN,
    SPAN_FACTOR,
    SPAN_LOUD,
    SPAN_MIN_GAIN,
    SPAN_NOISY_MIN_GAIN,
    SPAN_QUIET,
    SPAN_WIDTHS,
    TAIL_MIN_TOKENS,
    TAIL_SHARE,
    TAIL_TOKENS,
    VERSION_FACTOR,
    VERSION_MIN_TOKENS,
    VERSION_SHARE,
)
from rlbatch.alignment.tournament import WIDTH_FLOOR, widths
from rlbatch.catalogue import finding
from rlbatch.errors import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A loud beginning or end of a turn."""

    start: int
    """First entry of the evidence."""
    stop: int
    is_end: bool
    loud: float
    """Mean clipped |log_ratio| within, without the largest tenth, nats."""
    quiet: float
    """The same without, of all tokens."""
    quiet_widths: float
    """The same in widths."""


def loud_span(evidence: Evidence) -> Span | None:
    """The beginning or the end whose differences are of another size than the rest's."""
    at = np.flatnonzero(evidence.usable)
    if len(at) < CACHE_MIN_TOKENS + TAIL_MIN_TOKENS:
        return None
    errors = evidence.at_zero()[at]
    scaled = np.minimum(errors / widths(evidence.trainer[at]), SPAN_WIDTHS)
    before = np.cumsum(scaled)[:-1]
    num = np.arange(1, len(at))
    first, second = before / num, (scaled.sum() - before) / (len(at) - num)
    gains = (
        len(at) * np.log(scaled.mean() + WIDTH_FLOOR)
        - num * np.log(first + WIDTH_FLOOR)
        - (len(at) - num) * np.log(second + WIDTH_FLOOR)
    )
    split = int(gains.argmax())
    is_end = bool(second[split] > first[split])
    loud, quiet = (second, first) if is_end else (first, second)
    is_noisy = (evidence.floor or 0.0) > ZERO_NOISY
    if (
        gains[split] < (SPAN_NOISY_MIN_GAIN if is_noisy else SPAN_MIN_GAIN)
        or loud[split] < SPAN_FACTOR * quiet[split]
    ):
        return None
    parts = errors[: split + 1], errors[split + 1 :]
    size, others = float(np.minimum(parts[is_end], OUTLIER_TOKEN).mean()), float(parts[not is_end].mean())
    usual = 0.0 if evidence.floor is None else SPAN_FACTOR * evidence.floor
    if loud[split] < SPAN_LOUD or size < max(SPAN_LOUD, usual) or others > SPAN_QUIET:
        return None
    edge = int(at[split + 1])
    start, stop = (edge, len(evidence.trained)) if is_end else (0, edge)
    return Span(
        start=start,
        stop=stop,
        is_end=is_end,
        loud=_without_largest(parts[is_end]),
        quiet=others,
        quiet_widths=float(quiet[split]),
    )


def _without_largest(errors: NDArray[np.float64]) -> float:
    """Mean without the largest tenth, at least one: a few wild tokens make nothing loud."""
    kept = np.sort(errors)[: len(errors) - max(1, round(GROSS_TRIMMED_SHARE * len(errors)))]
    return float(kept.mean()) if len(kept) else 0.0


def span_cause(evidence: Evidence) -> Finding | None:
    """The cause of a loud beginning or end."""
    if not evidence.comparable or not evidence.current:
        return None
    span = loud_span(evidence)
    if span is None:
        return None
    is_rubbish = span.loud >= RUBBISH_MEAN
    if is_rubbish:
        return _last_tokens(evidence, span) if span.is_end else _cache(evidence, span)
    if not span.is_end and _decays(evidence, span):
        return _span_finding("prefix-differs", evidence, span)
    return _versions(evidence, span)


def _last_tokens(evidence: Evidence, span: Span) -> Finding | None:
    off = evidence.at_zero()[span.start : span.stop] > RUBBISH_MEAN
    # One wild token is a ratio-tail.
    if span.stop - span.start > TAIL_TOKENS or off.sum() < TAIL_MIN_TOKENS or off.mean() < TAIL_SHARE:
        return None
    return _span_finding("last-tokens-wrong", evidence, span)


def _cache(evidence: Evidence, span: Span) -> Finding | None:
    edge = evidence.first_token + span.stop
    if edge % CACHE_BLOCK or span.stop - span.start < CACHE_MIN_TOKENS:
        return None
    return _span_finding(
        "prefix-cache-rubbish", evidence, span, f"; token {edge} begins block {edge // CACHE_BLOCK}"
    )


def _versions(evidence: Evidence, span: Span) -> Finding | None:
    edge = span.start if span.is_end else span.stop
    if min(edge, len(evidence.trained) - edge) < VERSION_MIN_TOKENS or _labelled(evidence.versions, edge):
        return None
    if not _is_loud_throughout(evidence, span):
        return None
    known = np.unique(evidence.versions[evidence.versions >= 0])
    labels = f"version {', '.join(map(str, known.tolist()))} throughout" if len(known) else "no version"
    return _span_finding("mixed-versions", evidence, span, f"; the labels say {labels}")


def _is_loud_throughout(evidence: Evidence, span: Span) -> bool:
    """Whether both halves of the span are loud in many tokens: other weights spoil all of it."""
    if span.loud < max(SPAN_LOUD / 2, VERSION_FACTOR * span.quiet, evidence.floor or 0.0):
        return False
    part = evidence.part(span.start, span.stop)
    scaled = part.at_zero()[part.usable] / widths(part.trainer[part.usable])
    return all(
        np.minimum(half, SPAN_WIDTHS).mean() >= VERSION_FACTOR * span.quiet_widths
        and (half > VERSION_FACTOR * span.quiet_widths).mean() >= VERSION_SHARE
        for half in np.array_split(scaled, 2)
    )


def _labelled(versions: NDArray[np.int64], edge: int) -> bool:
    """Whether the labels change near the edge, so that they say it themselves."""
    near = versions[max(0, edge - VERSION_MIN_TOKENS) : edge + VERSION_MIN_TOKENS]
    return bool((near != near[0]).any())


def _decays(evidence: Evidence, span: Span) -> bool:
    errors = evidence.at_zero()[span.start : span.stop][evidence.usable[span.start : span.stop]]
    half = len(errors) // 2
    return half >= 2 and errors[:half].mean() > DECAY_FACTOR * errors[half:].mean()


def _span_finding(code: str, evidence: Evidence, span: Span, more: str = "") -> Finding:
    return finding(
        code,
        where=evidence.part(span.start, span.stop).place,
        expected="differences of one size along a turn",
        found=f"mean |log_ratio| {span.loud:.3g} nats in these {span.stop - span.start} tokens, "
        f"{span.quiet:.3g} in the other {len(evidence.trained) - (span.stop - span.start)} of the turn{more}",
    )
