"""Entries: what only the aggregate shows."""

from rlbatch.catalogue.entry import Entry

ENTRIES = (
    Entry(
        code="kld-high",
        level="drift",
        severity="error",
        symptom="The inference KLD is high, though no fault was found.",
        check="Capped k3 over at least min_tokens trained tokens of one version against Limits.",
        likely="the engine runs other weights or another precision than it should",
        fix="check the weight sync, the engine's dtype and quantisation, and its attention backend",
    ),
    Entry(
        code="stale",
        level="drift",
        severity="warning",
        symptom="Differences rise with the age of the data, while current tokens agree.",
        check="Capped k3 against version lag: a rise of 0.01 nats or more, by at least four standard errors.",
        likely="old rollouts; or a prefix cache that was kept over an update of the weights",
        fix="bound the age of what is trained; reset the engine's prefix cache at every update",
    ),
    Entry(
        code="ratio-mean-off",
        level="drift",
        severity="warning",
        symptom="The mean importance ratio is not 1, which it is whatever the trainer's weights.",
        check="Mean of exp(trainer - inference): 0.01 and five standard errors from 1, over 200 tokens; of "
        "older data below 1 only, since training on tokens makes them likelier.",
        likely="sampling was truncated (top-k, top-p, min-p) and nobody stated it; generate of Hugging Face "
        "has top_k 50 unless it is told otherwise",
        fix="state the sampling that was in force, and train it with purpose='train-truncated'; pass "
        "logits_for, which names the parameter",
    ),
    Entry(
        code="too-few-to-judge",
        level="drift",
        severity="warning",
        symptom="Noise cannot be told from a fault: few tokens, which do not agree closely.",
        check="Fewer than min_tokens compared tokens of one version, and segments that are not clean.",
        likely="few rollouts; or logprobs_mode or temperature stated wrongly, which looks just like this",
        fix="judge all batches of a step together, and give logits_for: without it a forgotten temperature "
        "cannot be told in so little data",
    ),
    Entry(
        code="ratio-tail",
        level="drift",
        severity="warning",
        symptom="One token's log_ratio is beyond anything that noise explains.",
        check="|log_ratio| above Limits.ratio_tail nats at a trained token.",
        likely="a token that the trainer holds to be impossible: a masked logit, or a wrong id",
        fix="look at the token named; clip or mask the ratio in the loss",
    ),
)
