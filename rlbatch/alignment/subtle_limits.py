"""The numbers by which subtle causes are told from noise and from each other, each with its reason."""

UNSURE_BELOW = -0.1
"""Logprob, nats, of tokens that are no near-certainties: what noise does to the others is rounding."""

LOOK_MEAN = 0.008
"""Mean |log_ratio| over the turns of one provenance, nats, from which they are worth a look together.

Engines in bf16 leave 0.002 to 0.005; top-p 0.95 renormalised
moves a token by 0.015 on average, temperature 0.9 by 0.035.
"""
LOOK_SIDED_MEAN, LOOK_SIDED_SHARE = 0.003, 0.6
"""The same where so much of it is on one side: noise goes both ways, a renormalised set lifts all tokens."""
LOOK_SHORT_MEAN = 0.003
"""The same where no turn is longer than a window, for a look at beginnings that asks for no logits."""
LOOK_BEGINNING_MEAN, LOOK_BEGINNING_FACTOR = 0.0005, 1.7
"""The same of the first windows of longer turns, and that over the mean of later ones: bf16 leaves 1.2."""
LOOK_TOKENS = 4096
"""Tokens of one provenance that are looked at together: at a KLD of 0.028 they settle every subtle cause."""
LOOK_ELEMENTS = 2**27
"""The same in logits: 1,000 tokens at a vocabulary of 130,000."""
LOOK_TURN_TOKENS = 256
"""Of them from one turn at most, so that many turns are heard."""

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
FAMILY_LEFT_SHARE = 0.95
"""Share of the differences that it may leave: to many tokens together, weights that were moved a little look
like a kept set of 200 ids or a divisor of 1.08, which leave 0.97 and more."""
FAMILY_OLD_SHARE = 0.1
"""Share of the differences that it may leave of older data, which other weights have moved as well."""
FAMILY_SINGLE_SHARE = 0.6
"""The same where one turn is all there is to go by."""
DIVISOR_NEAR_ONE, DIVISOR_COST = 0.12, 0.15
"""A divisor this near 1 says temperature 1, less what noise takes from the trainer; and its cost in gain.

The same of one this near ln 2 or ln 10, which says base 2 or 10, unless the stated temperature is as near.
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

NOISY_LEFT, NOISY_TOKENS = 0.02, 256
"""Mean |residual|, nats, that the best explanation leaves where noise must be modelled: bf16 leaves 0.005, a
KLD of 0.003 leaves 0.037. And unsure tokens from which its size is known, to a tenth."""
NOISY_MIN_GAIN = 20.0
"""Log likelihood ratio, nats, that an explanation must have there, its parameter paid for.

Clean pools of 4,096 tokens at a KLD of 0.028 reached 8; a top_k of 50 has 29.
"""
NOISY_MOST_VARIANCE = 0.4
"""Variance in logits that it may leave: 0.23 is a KLD of 0.028, and 0.4 would be one of 0.05."""
NOISY_SLOPE = 0.5
"""Differences over those predicted are 1 there within this: top-p that leaves one token leaves no noise
either, and of planted ones 0.69 to 1.46 was measured."""
NOISY_ZEROS_LEFT = 0.4
"""Share of exact zeros that it may leave: a buffer has them anywhere. Planted kept sets left up to 0.27."""

RIVAL_TURNS = 4
"""Turns from which more than an engine's own noise may be left: other weights fit one turn by chance."""
RIVAL_LEFT, RIVAL_FEW_LEFT, RIVAL_TOKENS = 0.985, 0.9, 2048
"""Share of the differences that a temperature or a penalty may leave beneath noise, of so many tokens, and of
fewer: other weights, told as one by the bulk of their tokens, left 1.00 to 1.05 of 2,048 tokens and 0.977 of
1,328. At a KLD of 0.028 a temperature 10 % off leaves 0.86 to 1.00, one 27 % off 0.65."""
RIVAL_RATIO, RIVAL_RATIO_ERRORS = 0.7, 7.0
"""Share of the predicted mean ratio that must be there, and standard errors over turns from 0.

Planted kept sets and divisors at a KLD of 0.028 have 0.77 to 1.15, 8.5 standard errors or more, and other
weights -0.1 to 1.1, 6.1 or fewer: their largest ratios are rare.
"""
RIVAL_RATIO_MOST = 10.0
"""Largest ratio of one token that is counted: tails of noise must not decide."""
RIVAL_HALF = 0.15
"""Share of the gain that each half of the turns must have."""
RIVAL_BASE_LEFT = 0.25
"""Share of the differences that base 10 may leave: it divides noise as well. Planted at a KLD of 0.028 it
left 0.14 at most, other weights told as base 10 left 0.41 to 0.43."""
RIVAL_DIVISOR = 0.06
"""Relative distance of a divisor from the stated temperature, beyond which it must leave no noise: whoever
divides logprobs by a temperature states it. Planted ones were told within 0.035."""

AGAIN_MEAN = 0.03
"""Mean |difference| of two passes of the trainer, nats, from which they disagree: bf16 leaves under 0.005."""
RESTLESS_SHARE = 0.25
"""Of the difference between passed logprobs and those of the logits, by which two answers must differ.

Dropout makes all three differ alike; kernels that add up in another order each time move the last digits.
"""
OWN_LEAST = 0.01
"""Mean |difference| of passed logprobs and those of the logits, nats, from which it is asked how they differ.

Twice what bf16 leaves: an explanation leaves next to nothing of it, whatever the engine's noise.
"""
OWN_LEFT_SHARE = 0.25
"""Most that an explanation may leave of it."""
OWN_SCALED_SHARE, OWN_LEAST_SCALE = 0.05, 0.2
"""The same of one free factor, and the least factor: values near 0 are any logprob times next to nothing."""
SIDE_TOKENS = 64
"""Tokens of a segment whose logits say whose list is the one that is out of place."""
SIDE_ACQUITTED = 8
"""Segments in which the logits agree with the trainer's list, from which it is asked of no further ones."""

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
CACHE_GAIN_SHARE = 0.93
"""Share of the best edge's gain that the end of a block must have for the span to end there.

Of 149 planted spans at a KLD of 0.028 with heavy tails the best edge was the end of the block in 116; of the
other 33, tokens that are nearly certain or wild by chance had moved it by at most 10.
"""
CACHE_MIN_TOKENS = 6
"""Tokens of a span that may be told by where it ends."""
TAIL_QUIET, TAIL_REST_SHARE = 0.4, 0.02
"""Mean |log_ratio| of the rest, nats, beyond which it is off too: hot turns at a KLD of 0.028 leave 0.35.

And the share of rubbish among them, of which such noise leaves one in 300.
"""
TAIL_MIN_GAIN, TAIL_SURE_GAIN = 8.0, 16.0
"""Nats by which noise does not do that to the last tokens, for a warning and for an error."""
TAIL_BEFORE = 16
"""Tokens right before the last ones by which noise is known there: other weights move all of them."""
VERSION_MIN_TOKENS, VERSION_UNSURE_TOKENS = 16, 8
"""Tokens on either side of a change of weights, and tokens of them that are no near-certainties."""
VERSION_FACTOR, VERSION_SHARE = 2.0, 0.25
"""Each half of what other weights drew over the rest, in widths; and the share of its tokens so far off."""
VERSION_WIDTHS = 6.0
"""Most that one token adds to either size, times the median of the turn: tails speak for nobody."""
VERSION_MIN_GAIN, VERSION_SURE_GAIN = 15.0, 22.0
"""Log likelihood ratio, nats, of two sizes over one in a turn, for a warning and for an error.

Of 15,000 turns made of clean blocks at a KLD of 0.028, heavy, the largest is 13.3, of 1,200 real ones 9.2.
"""
VERSION_POOL_GAIN, VERSION_ROW_COST, VERSION_POOL_FACTOR = 40.0, 4.0, 2.5
"""The same of many turns together, what each of them costs, as its place is chosen, and the least factor.

Of 20,000 pools of 5 to 25 clean turns none reaches 13; planted changes in 10 turns leave 60 in 99 of 100. In
bf16 differences grow by 2.3 over 400 tokens by themselves.
"""
VERSION_POOL_TURNS, VERSION_POOL_NOISE = 3, 0.02
"""Turns in which it must show, and nats that their quiet part has at least: a KLD of 0.003 leaves 0.06."""
SPAN_REST_TOKENS = 16
"""Tokens that must be quiet after a beginning that is another prompt's: 5 tokens may all be certain."""
DECAY_FACTOR = 2.0
"""First half of a loud beginning over its second half: a prefix that differs is forgotten."""
PREFIX_EARLY, PREFIX_LATE = 8, 24
"""Tokens of a turn that are early, and from which they are late."""
PREFIX_FADES = 8.0
"""Tokens in which the weight of a place falls e times: of 3, 8 and 24, other prompts show best by 8."""
PREFIX_STRATA, PREFIX_STRATUM = 8, 16
"""Groups of tokens of like certainty, and the least of them that make one."""
PREFIX_SHARE_LOUD = 0.15
"""Share of early tokens above twice the mean of late ones, and above the least: a lost BOS moves 0.4
of them by 0.01 nats."""
PREFIX_LEAST = 0.005
"""Mean |log_ratio| of early tokens, nats, below which nothing is told: bf16 reached 0.010 in 64 tokens."""
PREFIX_ERRORS, PREFIX_SURE_ERRORS = 3.8, 6.0
"""Standard errors by which first tokens are the louder ones, and from which it is an error and no warning.

Clean pools reached 3.6, at any noise; of 120,000 bootstrapped rows 20 were told, one of them with 4.5. What a
turn of 64 tokens says with 4, a step of some thousands says with far more than 6.
"""
PREFIX_QUIET, PREFIX_FACTOR, PREFIX_QUIET_ERRORS = 0.08, 2.0, 3.3
"""The same where unsure late tokens are off by at most 0.08 widths, and early ones by twice as many nats as
late ones: engines leave 0.02 widths, and a KLD of 0.003 leaves 0.12."""
PREFIX_NOISY_FACTOR = 3.2
"""Nats of early tokens over late ones elsewhere: other weights begin louder by 2.0 to 2.7, having little to
go by, and planted prompts at a KLD of 0.028 by 4.4 and more."""
PREFIX_LOUD, PREFIX_LOUD_ERRORS = 0.02, 2.4
"""And where early ones have 0.02 nats as well."""

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
SLOT_QUIET_OFF, SLOT_QUIET_TRAINER = 2.0, -3.0
"""The two in a turn without noise, where no token is wild: bf16 leaves 0.25 nats."""
SLOT_QUIET_MOST = 6
"""Most such slots, wakes included: where one token in six is off, other weights drew the rest of the turn."""
SLOT_STANDS_OUT = 10.0
"""Times the mean |log_ratio| of unsure tokens after it that a slot is off in such a turn: where other weights
drew the rest, the first token that shows it was off by 8 times as much at most."""
SLOT_NOISY = 0.02
"""Noise of a turn, in widths, from which one slot may be a wild token."""
SLOT_CHANCE = 0.03
"""Most that chance may have in it that another id has the engine's value at a slot."""
SLOT_LATER_CHANCE = 0.3
"""The same at later ones, where it is known that ids are wrong."""
SLOT_FIT, SLOT_WIDTHS = 3e-5, 3.0
"""Nats, and times the noise of the turn, within which another id must have the engine's value."""
SLOT_BEFORE = 6
"""Unsure tokens before the first slot by which noise is known: a wrong id moves only what follows it."""
WAKE_POWER = 2.2
"""Exponent of the tails of noise: at a KLD of 0.028, heavy, 8.3, 23 and 75 times its mean are reached once in
100, 1,000 and 10,000 tokens."""
WAKE_PLACE = 4.0
"""Nats that each slot costs: it is chosen among the tokens of its turn."""
WAKE_LEAST, WAKE_SURE, WAKE_ERROR = 4.0, 10.0, 18.0
"""Nats of what follows a slot, and of all slots together, for a warning and for an error in a noisy turn.

Of 3,600 clean rows at a KLD of 0.028, heavy, 139 have a slot: the largest are 4.2 after one, 8.3 together.
"""
WAKE_NOISE = 0.5
"""Noise, in widths, beyond which nothing follows from single tokens: a KLD of 0.028 leaves 0.16."""
WAKE_TOKENS = 4
"""Tokens after one that is off that are its wake: where a wrong id stands, they are off as well."""

CONFIDENT_BELOW = -0.6932
"""Engine logprob, nats, of a token it is sure of: probability one half."""
CONFIDENT_OFF = 2.0
"""Nats that the trainer must be lower."""
CONFIDENT_MIN_TOKENS = 4
CONFIDENT_MOST_SHARE, CONFIDENT_FACTOR = 0.25, 5.0
"""Largest share of such tokens: where more are off, other weights drew. And times as many as the tails of
noise have; at a KLD of 0.1 other weights left 5 in 337 tokens, where noise of that mean has one."""
CONFIDENT_NEARLY, CONFIDENT_NEARLY_SHARE = 1.0, 0.5
"""Nats from which a token is nearly one, or one of which the engine is unsure, and how many there may be of
them for each. A kernel that is wrong for some inputs leaves hardly any; other weights at a KLD above 0.1 left
more in 12 of 14 turns."""
CONFIDENT_MIN_SHARE = 0.005
"""Such tokens in a turn, from which noise is no excuse; and their share, where there is noise in the rest."""
