"""The numbers by which logprobs are judged, each with its reason: aggregates, suspects, and gross causes.

Those of subtle causes are in `subtle_limits`. Nothing else decides.
"""

from dataclasses import dataclass

from rlbatch.errors import RecordError
from rlbatch_kernels import WINDOW as KERNEL_WINDOW


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


STALE_ERRORS, STALE_LEAST = 4.0, 0.01
"""Standard errors by which the capped KLD must rise with age, and its least rise up to the oldest, nats.

A third of the 0.03 that healthy runs reach: less is of no interest, however sure it is.
"""

RATIO_ERRORS, RATIO_LEAST, RATIO_MIN_TOKENS = 5.0, 0.01, 200
"""Standard errors and least amount by which the mean importance ratio must be off 1, and the fewest tokens.

Rare large ratios are missing from most samples, so that a clean mean lies below 1 more surely than its errors
say: of 20,000 steps of 32 rows at a KLD of 0.028 with heavy tails 0.06 % were off by four errors, none by
five; at 0.1, beyond what is healthy, 0.03 %. Without noise a mean is off by many errors, of 1e-6 each.
"""

CLEAN_MEAN = 0.02
"""Mean |log_ratio| of a segment, nats, below which it counts as judged however short: bf16 leaves 0.003."""

OUTSIDE_SHARE = 0.02
"""Share of tokens outside the trainer's own kept sets above which nothing is called sound.

bf16 sampling left 0.17 and 0.34 % outside the sets of a float32 trainer, at their edges.
"""

WINDOW = KERNEL_WINDOW
"""Tokens of a segment that are looked at together: a fault in one stretch must not drown in the rest."""

SUSPECT_MEAN = 0.1
"""Mean clipped |log_ratio| of a window, nats, from which its segment is worth a look. It decides nothing.

Lags are looked for from `rlbatch_kernels.WINDOW_LEAST` on.
"""

SUSPECT_FACTOR = 2.5
"""And at least this many times what is usual: in a noisy run every window reaches the first."""
FLOOR_MOST = 0.2
"""Usual mean |log_ratio|, nats, beyond which it is no noise, and says nothing of what is."""

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
RENORMALISED_MIN_TOKENS, RENORMALISED_LEAST, RENORMALISED_ERRORS = 6, 0.01, 2.5
"""Tokens, nats and standard errors by which values that are not 0 lie above the trainer's where the engine
renormalised over a kept set: zeros beside them are of a kept set of one token."""

LEFT_MOST = 0.25
"""Most that an explanation may leave of comparable values, nats: twice what a KLD of 0.028 leaves."""
LEFT_FACTOR, LEFT_LEAST = 3.0, 0.03
"""And at most this many times what is usual among segments like it, where that is known, or 0.03 nats."""
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
ZERO_NOISY = 0.02
"""Mean |log_ratio| of other tokens, nats, from which noise alone may explain a trainer's doubt."""
ZERO_CLEAR, ZERO_NOISY_MIN_TOKENS = -0.5, 3
"""Then a zero counts where the trainer is below -0.5 nats, and three of them are needed."""
ZERO_NOISY_SHARE = 0.1
"""And this share of all zeros: where a hundred tokens are certain, heavy tails spare not every one."""
ZERO_REST_TOKENS = 4
"""Other tokens of the turn that must agree for zeros to be the fault, where there are so many."""
ZERO_DEEP = -1.5
"""Trainer logprob, nats, too low for a kept set of one token, whatever the other values say."""
ZERO_OLD_MIN_EVIDENCE = 2.0
"""The same for data of other weights, which may have been certain where the trainer no longer is."""

ZERO_OLD_MIN_TOKENS, ZERO_OLD_SHARE = 8, 0.5
"""And so many of them, and this share of all zeros: at a KLD of 0.5 other weights left 4 in 35 tokens."""

WIDE_LAGS = 256
"""Largest lag that is looked for where no small one explains a segment, as of a slice at a wrong column."""
WIDE_MIN_VOTES = 5
"""Witnesses needed on either side for such a lag: there are many to choose from."""

PATH_LAGS = (-4, -3, -2, -1, 0, 1, 2, 3, 4)
"""Lags between which a segment may change: several entries put in, or lost."""
PATH_SWITCH = 8.0
"""Nats that a change of lag must save: two tokens that are wholly off."""
PATH_BLOCK = 4
"""Tokens within which a change is placed at first, before it is placed exactly."""
PATH_VERIFIED_SHARE = 0.7
"""Share of the tokens at other lags that must lie in stretches with witnesses of their own."""

COMPANY_MIN, COMPANY_SHARE = 3, 0.25
"""Segments that share a cause, from which another one must be told of more than this share of them."""

PEERS_MIN = 5
"""Segments from which what is usual among them can be said."""
PEERS_MIN_TOKENS = 8
"""Tokens of a segment whose mean says anything about what is usual."""
PEERS_QUIET = 0.02
"""Usual mean |log_ratio| of a segment, nats, up to which a run is one without noise; bf16 leaves 0.005."""
PEERS_OFF, PEERS_TOKEN_OFF = 0.06, 2.5
"""Mean |log_ratio| of a segment, and of one token, that no such run leaves: bf16 leaves 0.014 and 0.25."""
OUTLIER_FACTOR = 4.0
"""A segment with this many times the usual mean |log_ratio| is worth a look."""
OUTLIER_LEAST = 0.01
"""Mean |log_ratio|, nats, below which none is: more than engines in bf16 leave."""
OUTLIER_MOST = 0.4
"""The same above which every one is, however usual that may be."""
OUTLIER_TOKEN = 2.5
"""|log_ratio| of one token, nats, from which its segment is worth a look."""

SIGN_MIN_TOKENS = 4
"""Tokens above 0 that the turned sign must explain."""
ROWS_MIN_TOKENS = 8
"""Tokens in which one row can be told from another."""
ROWS_FAR_MIN_TOKENS = 16
"""The same where all rows are far off, or of older weights: 9 tokens then fit another row by chance."""
ROWS_OFF = 0.25
"""Mean |log_ratio| to the own trainer logprobs, nats, below which a row is its own."""
ROWS_MIN_VOTES = 5
"""Witnesses needed for another row: there are many rows to choose from."""
ROWS_HEAD = 64
"""First tokens by which all rows are compared, before the best of them are in full."""
ROWS_CANDIDATES = 8
RULE_MIN_ROWS = 3
"""Rows from which a rule among their lags can be told from chance; one that it leaves in place is one too."""
RULE_MIN_VALUES, RULE_MIN_VALUES_ALL_MOVED = 2, 3
"""Different lengths, paddings or numbers among them, and where the rule leaves no row in place.

Lags of -1, -1 and -3, drawn at random, follow prompts of 23, 23 and 25.
"""
