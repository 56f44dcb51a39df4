"""One end of a turn is off and the rest is not: which end, how far, and where it stops tell the cause."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.limits import GROSS_TRIMMED_SHARE, OUTLIER_TOKEN, ZERO_NOISY
from rlbatch.alignment.subtle_limits import (
    CACHE_BLOCK,
    CACHE_GAIN_SHARE,
    CACHE_MIN_TOKENS,
    DECAY_FACTOR,
    RUBBISH_MEAN,
    SPAN_FACTOR,
    SPAN_LOUD,
    SPAN_MIN_GAIN,
    SPAN_NOISY_MIN_GAIN,
    SPAN_QUIET,
    SPAN_REST_TOKENS,
    SPAN_WIDTHS,
    TAIL_BEFORE,
    TAIL_MIN_GAIN,
    TAIL_MIN_TOKENS,
    TAIL_QUIET,
    TAIL_REST_SHARE,
    TAIL_SHARE,
    TAIL_SURE_GAIN,
    TAIL_TOKENS,
    UNSURE_BELOW,
    WAKE_POWER,
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
    if not is_end and _without_largest(parts[0]) >= RUBBISH_MEAN:
        edge = _block_edge(evidence, at[1:], gains) or edge
    start, stop = (edge, len(evidence.trained)) if is_end else (0, edge)
    return Span(
        start=start,
        stop=stop,
        is_end=is_end,
        loud=_without_largest(parts[is_end]),
        quiet=others,
        quiet_widths=float(quiet[split]),
    )


def _block_edge(evidence: Evidence, edges: NDArray[np.intp], gains: NDArray[np.float64]) -> int | None:
    """The end of a block that explains nearly as much as the best edge does; None where there is none.

    Tokens after a boundary that are wild by chance, or certain ones, move the best edge by a few.
    """
    ends = ((evidence.first_token + edges) % CACHE_BLOCK == 0) & (edges <= edges[gains.argmax()])
    if not ends.any():
        return None
    best = int(np.where(ends, gains, -np.inf).argmax())
    return int(edges[best]) if gains[best] >= CACHE_GAIN_SHARE * gains.max() else None


def _without_largest(errors: NDArray[np.float64]) -> float:
    """Mean without the largest tenth, at least one: a few wild tokens make nothing loud."""
    kept = np.sort(errors)[: len(errors) - max(1, round(GROSS_TRIMMED_SHARE * len(errors)))]
    return float(kept.mean()) if len(kept) else 0.0


def span_cause(evidence: Evidence) -> Finding | None:
    """The cause of a loud beginning."""
    if not evidence.comparable or not evidence.current:
        return None
    span = loud_span(evidence)
    if span is None:
        return None
    if span.is_end:
        return None
    if span.loud >= RUBBISH_MEAN:
        return _cache(evidence, span)
    rest = np.count_nonzero(evidence.usable[span.stop :])
    is_prefix = rest >= SPAN_REST_TOKENS and _decays(evidence, span)
    return _span_finding("prefix-differs", evidence, span) if is_prefix else None


def _cache(evidence: Evidence, span: Span) -> Finding | None:
    edge = evidence.first_token + span.stop
    if edge % CACHE_BLOCK or span.stop - span.start < CACHE_MIN_TOKENS:
        return None
    return _span_finding(
        "prefix-cache-rubbish", evidence, span, f"; token {edge} begins block {edge // CACHE_BLOCK}"
    )


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


def last_tokens_wrong(evidence: Evidence) -> Finding | None:
    """The last few tokens of a turn are far off, and hardly one of the others."""
    usable = np.flatnonzero(evidence.usable)
    if not evidence.comparable or not evidence.current or len(usable) < CACHE_MIN_TOKENS + TAIL_MIN_TOKENS:
        return None
    errors = evidence.at_zero()[usable]
    off = errors > RUBBISH_MEAN
    lengths = [
        num
        for num in range(TAIL_MIN_TOKENS, min(TAIL_TOKENS, len(off) - CACHE_MIN_TOKENS) + 1)
        if off[-num] and off[-num:].sum() >= TAIL_MIN_TOKENS and off[-num:].mean() >= TAIL_SHARE
    ]
    if not lengths:
        return None
    num = lengths[-1]
    rest = errors[:-num]
    if rest.mean() > TAIL_QUIET or off[:-num].mean() > TAIL_REST_SHARE:
        return None
    scaled = rest / widths(evidence.trainer[usable][:-num])
    near = scaled[evidence.trainer[usable][:-num] < UNSURE_BELOW][-TAIL_BEFORE:]
    means = [float(each.mean()) for each in (scaled, near) if len(each)]
    noise = max(*means, evidence.floor or 0.0, WIDTH_FLOOR)
    nats = WAKE_POWER * np.log(np.maximum(np.abs(evidence.log_ratio())[usable[-num:]] / noise, 1.0)) - 1.0
    if nats.sum() < TAIL_MIN_GAIN:
        return None
    start = int(usable[-num])
    return finding(
        "last-tokens-wrong",
        severity="error" if nats.sum() >= TAIL_SURE_GAIN else "warning",
        where=evidence.part(start, len(evidence.trained)).place,
        expected="differences of one size along a turn",
        found=f"mean |log_ratio| {errors[-num:].mean():.3g} nats in these {len(evidence.trained) - start} "
        f"tokens, {rest.mean():.3g} in the other {start} of the turn",
    )
