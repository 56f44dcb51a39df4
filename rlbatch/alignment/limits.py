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


STALE_ERRORS, STALE_LEAST = 4.0, 0.01
"""Standard errors by which the capped KLD must rise with age, and its least rise up to the oldest, nats.

A third of the 0.03 that healthy runs reach: less is of no interest, however sure it is.
"""

CLEAN_MEAN = 0.02
"""Mean |log_ratio| of a segment, nats, below which it counts as judged however short: bf16 leaves 0.003."""

OUTSIDE_SHARE = 0.02
"""Share of tokens outside the trainer's own kept sets above which nothing is called sound.

bf16 sampling left 0.17 and 0.34 % outside the sets of a float32 trainer, at their edges.
"""

WINDOW = 64
"""Tokens of a segment that are looked at together: a fault in one stretch must not drown in the rest."""

SUSPECT_MEAN = 0.1
"""Mean clipped |log_ratio| of a window, nats, from which its segment is worth a look. It decides nothing."""

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
LAG_LEAST = 0.02
"""Mean |log_ratio| at lag 0, nats, below which no lag is looked for: it could not be told from noise."""
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

LOOK_MEAN = 0.008
"""Mean |log_ratio| over the turns of one provenance, nats, from which they are worth a look together.

Engines in bf16 leave 0.002 to 0.005; top-p 0.95 renormalised
moves a token by 0.015 on average, temperature 0.9 by 0.035.
"""
LOOK_SIDED_MEAN, LOOK_SIDED_SHARE = 0.003, 0.6
"""The same where so much of it is on one side: noise goes both ways, a renormalised set lifts all tokens."""
LOOK_BEGINNING_MEAN, LOOK_BEGINNING_FACTOR = 0.003, 1.7
"""The same of the first windows, and that over the mean of later ones: bf16 leaves 1.2."""
LOOK_TOKENS = 4096
"""Tokens of one provenance that are looked at together: at a KLD of 0.028 they settle every subtle cause."""
LOOK_ELEMENTS = 2**27
"""The same in logits: 1,000 tokens at a vocabulary of 130,000."""
LOOK_TURN_TOKENS = 256
"""Of them from one turn at most, so that many turns are heard."""

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

FAMILY_MIN_GAIN = 22.0
"""Log likelihood ratio, nats, that an explanation must have over what is stated, its parameter paid for."""
FAMILY_MIN_MARGIN = 6.0
"""The same over the next cause."""
FAMILY_MARGIN_SHARE = 0.03
"""And at least this share of the gain: no grid and no noise model is exact."""
FAMILY_SIMPLER = 3.0
"""Nats by which a later family must beat an earlier, simpler one."""
FAMILY_PARAMETER = 8.0
"""Nats that a parameter costs, as it is chosen from many."""
FAMILY_OLD_SHARE = 0.1
"""Share of the differences that it may leave of older data, which other weights have moved as well."""
FAMILY_SINGLE_SHARE = 0.6
"""The same where one turn is all there is to go by."""
DIVISOR_NEAR_ONE, DIVISOR_COST = 0.12, 0.15
"""A divisor this near 1 says temperature 1, less what noise takes from the trainer; and its cost in gain.

Planted temperatures at a KLD of 0.028: a divisor of 1.05 then gains 2 % more than the true temperature 1.
"""
FAMILY_HOPELESS_SHARE = 0.75
"""Share of the differences in the first tokens of a turn that every family leaves where none will explain it.

Rows of other tokens, and rows with zeros in them, leave 0.84 and more; what explains a turn leaves 0.6.
"""
FAMILY_SLOPE, FAMILY_SLOPE_ERRORS, FAMILY_SLOPE_MOST = 0.05, 3.0, 0.35
"""Differences over those predicted are 1 where it holds, within 0.05 and three standard errors."""
FAMILY_MIN_INFORMATIVE = 8
"""Tokens that the explanation must move."""

AGAIN_MEAN = 0.03
"""Mean |difference| of two passes of the trainer, nats, from which they disagree: bf16 leaves under 0.005."""

SIGN_MIN_TOKENS = 4
"""Tokens above 0 that the turned sign must explain."""
ROWS_MIN_TOKENS = 8
"""Tokens in which one row can be told from another."""
ROWS_OFF = 0.25
"""Mean |log_ratio| to the own trainer logprobs, nats, below which a row is its own."""
ROWS_MIN_VOTES = 5
"""Witnesses needed for another row: there are many rows to choose from."""
ROWS_HEAD = 64
"""First tokens by which all rows are compared, before the best of them are in full."""
ROWS_CANDIDATES = 8
RULE_MIN_ROWS = 3
"""Rows from which a rule among their lags can be told from chance; one that it leaves in place is one too."""

SPAN_MIN_GAIN = 30.0
"""Log likelihood ratio, nats, of two sizes of differences in one turn over one: the place is chosen too."""
SPAN_NOISY_MIN_GAIN = 45.0
"""The same in a noisy run: at a KLD of 0.028 one clean row in some thousands reaches 30."""
SPAN_FACTOR = 3.0
"""Loud over quiet, in widths: bf16 noise grows by 2.3 over 400 tokens."""
SPAN_WIDTHS = 4.0
"""Most that one token adds to either, in widths."""
SPAN_LOUD = 0.06
"""Mean |log_ratio|, in nats and in widths, below which no stretch is loud."""
SPAN_QUIET = 0.2
"""The same above which no stretch is quiet: a KLD of 0.028 leaves 0.15."""
RUBBISH_MEAN = 1.8
"""Mean clipped |log_ratio|, nats, of values that are of no weights at all."""
TAIL_TOKENS = 15
"""Longest run at the end of a turn that counts as its last tokens."""
TAIL_MIN_TOKENS = 2
TAIL_SHARE = 0.6
"""Tokens of such a run that are rubbish, at least, and their share of it."""
CACHE_BLOCK = 16
"""Tokens of a block of an engine's prefix cache; vLLM's default."""
CACHE_MIN_TOKENS = 6
"""Tokens of a span that may be told by where it ends."""
VERSION_MIN_TOKENS = 16
"""Tokens on either side of a change of weights."""
VERSION_FACTOR, VERSION_SHARE = 2.0, 0.25
"""Each half of what other weights drew over the rest, in widths; and the share of its tokens so far off."""
DECAY_FACTOR = 2.0
"""First half of a loud beginning over its second half: a prefix that differs is forgotten."""
PREFIX_WIDTHS = 6.0
"""Most that one token adds to what a profile says, times the mean of those that are not early."""
PREFIX_EARLY, PREFIX_LATE, PREFIX_STOP = 8, 24, 96
"""Tokens of a turn that are early, from which they are late, and up to which they are compared."""
PREFIX_FACTOR, PREFIX_MIN_GAIN = 2.5, 20.0
"""Early over late, in widths, and the log likelihood ratio, nats, of two sizes over one.

Clean pools of two to thirty turns reached 3.2 and 13, or 1.7 and 34, never both; a prompt without its first
token leaves 3 to 7 in float32 and bf16.
"""
PREFIX_NOISY_FACTOR, PREFIX_NOISY_MIN_GAIN = 1.5, 22.0
"""The same in a noisy run: at a KLD of 0.028 clean pools reached 1.46 and 17, a lost token 1.5 and 20."""
PREFIX_NOISY_SURE_GAIN = 60.0
"""The gain from which it is an error there and no warning: clean bootstrapped pools reach 22 now and then."""
PREFIX_NOISY_TOKENS = 1536
"""Tokens of a pool from which that is so: a handful of turns reach it by chance."""
PREFIX_UNSURE_GAIN, PREFIX_NOISY_UNSURE_GAIN = 4.0, 0.3
"""The gain in tokens that are no near-certainties: up to 2 in clean pools of bf16, below 0 in noisy ones."""
UNSURE_BELOW = -0.1
"""Logprob, nats, of such tokens."""
PREFIX_SHARE_LOUD = 0.22
"""Share of early tokens above twice the mean of late ones, so that not one or two make a beginning loud."""
PREFIX_BETWEEN = 0.9
"""Least that the tokens between are, over the late ones: it fades, and it does not turn over."""

SLOT_OFF = 3.0
"""Nats by which the trainer must be below the engine at a slot that holds a wrong id."""
SLOT_FACTOR = 15.0
"""And times what the tokens in their neighbourhood leave."""
SLOT_TRAINER = -5.0
"""Trainer logprob, nats, above which a stored id is no stranger to its place."""
SLOT_AFTER = 8
"""Tokens after a wrong id that it moves as well."""
SLOT_MOST = 0.3
"""Most slots, as a share of the tokens: beyond, the row is another row."""
SLOT_NOISY, SLOT_NOISY_MIN = 0.02, 2
"""Mean |log_ratio| of the rest, nats, from which one slot may be a wild token, and slots needed then."""
SLOT_CHANCE = 0.03
"""Most that chance may have in it that another id has the engine's value at a slot."""
SLOT_FIT, SLOT_WIDTHS = 3e-5, 3.0
"""Nats, and times the noise of the turn, within which another id must have the engine's value."""
SLOT_BEFORE = 8
"""Tokens before the first slot by which its noise is known: a wrong id moves what follows it, and no more."""
AFTERMATH_TOKENS, AFTERMATH_FACTOR, AFTERMATH_WIDTHS = 4, 2.0, 6.0
"""Tokens after one that is off, and how many times louder than others they are where a wrong id stands.

Without a wrong id they are as loud as any. A token adds at most so many times the mean of others.
"""

CONFIDENT_BELOW = -0.6932
"""Engine logprob, nats, of a token it is sure of: probability one half."""
CONFIDENT_OFF = 2.0
"""Nats that the trainer must be lower."""
CONFIDENT_MIN_TOKENS = 4
CONFIDENT_MIN_SHARE = 0.02
"""Such tokens in a turn, from which noise is no excuse; and their share, where there is noise in the rest."""
