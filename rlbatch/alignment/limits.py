"""The numbers by which logprobs are judged, each with its reason. Nothing else decides."""

from dataclasses import dataclass

from rlbatch.errors import RecordError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on aggregates: the last net, for what no cause explains."""

    kld_error: float = 0.1
    """Mean capped inference KLD, nats, above which current tokens are an error; healthy runs reach 0.03."""
    kld_warning: float = 0.05
    """The same for a warning, and for tokens of other versions."""
    min_tokens: int = 1000
    """Trained tokens of one version below which the two limits above are not applied."""
    ratio_tail: float = 20.0
    """|log_ratio| of one token, nats, above which it is pointed out."""
    rank_timeout: float = 600.0
    """Seconds for which the other ranks of a group are waited for."""

    def __post_init__(self) -> None:
        if not 0 < self.kld_warning <= self.kld_error:
            raise RecordError(
                f"Limits: expected 0 < kld_warning <= kld_error, "
                f"found {self.kld_warning} and {self.kld_error}"
            )
        if not (self.min_tokens >= 1 and 0 < self.ratio_tail < float("inf")):
            raise RecordError(
                f"Limits: expected min_tokens >= 1 and a finite ratio_tail above 0, "
                f"found {self.min_tokens} and {self.ratio_tail}"
            )
        if not 0 < self.rank_timeout < float("inf"):
            raise RecordError(f"Limits: expected a finite rank_timeout above 0, found {self.rank_timeout}")


CLEAN_MEAN = 0.02
"""Mean |log_ratio| of a segment, nats, below which it counts as judged however short: bf16 leaves 0.003."""

WINDOW = 64
"""Tokens of a segment that are looked at together: a fault in one stretch must not drown in the rest."""

SUSPECT_MEAN = 0.1
"""Mean clipped |log_ratio| of a window, nats, from which its segment is worth a look. It decides nothing."""

GROSS_MEAN = 0.5
"""The same without its largest tenth, nats, that noise does not reach: 0.2 at a KLD of 0.028."""
GROSS_MIN_TOKENS = 16
"""Fewer tokens are at most doubtful: 9 honest ones at a KLD of 0.06 reach that mean once in 500 rows."""
GROSS_TRIMMED_SHARE = 0.1
"""Share of the largest differences left out, at least one token: a single wild token is a ratio-tail."""

DOUBT_MEAN, DOUBT_SPREAD = 0.35, 0.6
"""A shorter segment of n tokens is doubtful above 0.35 + 0.6 / sqrt(n) nats, its largest left out from four.

Twice what a KLD of 0.03 leaves, and room for chance. A doubt is a warning; nothing with one is called sound.
"""
DOUBT_DROPS_FROM = 4
"""Tokens from which the largest is left out: alone it is a ratio-tail."""

STRANGER_SHARE = 0.7
"""Spread of the differences at lag 0 over that of random pairs: about 1 for values of other tokens.

Old data that belongs to its tokens stays well below; above, no age excuses the difference.
"""
STRANGER_RANK = 0.3
"""Share of random pairings that fit at least as well: uniform for strangers, 0 for what belongs together."""
STRANGER_MIN_TOKENS = 32
"""Fewer cannot tell: of honest old rows of 16 tokens at a KLD of 0.2 one in forty looked like strangers."""
STRANGER_MIN_UNCERTAIN = 4
"""Tokens on each side that are no near-certainties; with fewer, any two rows look like strangers."""
UNCERTAIN_BELOW = -0.7
"""Logprob, nats, of a token that is no near-certainty: probability one half."""

LAG_ACCEPTED_SHARE = 0.25
"""A lag explains a segment when its residual is at most this share of that at lag 0.

On recorded rollouts the planted lag leaves at most 0.16 of the next best, truncated sampling included, and
lag 0 of clean rows at most 0.15 of its next best.
"""
LAG_FLOOR = 0.25
"""Most that an accepted lag may leave of comparable values, nats: twice what a KLD of 0.028 leaves."""
LAG_VOTE = 0.25
"""Nats by which one token must prefer one lag over another to count as a witness."""
LAG_MIN_PAIRS = 6
"""Pairs that a lag needs: a handful of honest tokens may fit one by chance."""
LAG_MIN_VOTES = 2
"""Witnesses needed on either side of the pairs: one odd token at an edge is no shift."""
LAG_FROM_MIN_VOTES = 4
"""The same where the place of the change is chosen too, which is that much easier to fit."""

ZERO_TRAINER_BELOW = -1e-3
"""Trainer logprob, nats, under which an exact 0 cannot be rounding of a probability near 1."""
ZERO_MIN_EVIDENCE = 0.05
"""Nats that the trainer gives such tokens together, below which they neither harm nor prove anything."""
ZERO_OLD_MIN_EVIDENCE = 2.0
"""The same for data of other weights, which may have been certain where the trainer no longer is."""
