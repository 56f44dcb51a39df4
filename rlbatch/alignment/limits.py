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

    def __post_init__(self) -> None:
        if not 0 < self.kld_warning <= self.kld_error:
            raise RecordError(
                f"Limits: expected 0 < kld_warning <= kld_error, "
                f"found {self.kld_warning} and {self.kld_error}"
            )
        if self.min_tokens < 1 or self.ratio_tail <= 0:
            raise RecordError(
                f"Limits: expected min_tokens >= 1 and ratio_tail > 0, "
                f"found {self.min_tokens} and {self.ratio_tail}"
            )


CLEAN_MEAN = 0.02
"""Mean |log_ratio| of a segment, nats, below which it counts as judged however short: bf16 leaves 0.003."""

GROSS_MEAN = 0.5
"""Mean clipped |log_ratio| of a segment, nats, that noise does not reach: 0.2 at a KLD of 0.028."""
GROSS_MIN_TOKENS = 8
"""Below this one odd token is the whole mean."""

LAG_ACCEPTED_SHARE = 0.25
"""A lag explains a segment when its residual is at most this share of every other lag's.

On recorded rollouts the planted lag leaves at most 0.16 of the next best, truncated sampling included, and
lag 0 of clean rows at most 0.15 of its next best.
"""
LAG_FLOOR = 0.25
"""Most that an accepted lag may leave of comparable values, nats: twice what a KLD of 0.028 leaves."""
LAG_VOTE = 0.5
"""Nats by which one token must prefer one lag over another to count as a witness."""
LAG_MIN_VOTES = 2
"""Witnesses needed on either side of the pairs: one odd token at an edge is no shift."""

ZERO_TRAINER_BELOW = -1e-3
"""Trainer logprob, nats, under which an exact 0 cannot be rounding of a probability near 1."""
