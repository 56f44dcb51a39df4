"""Tokens that the trainer's own kept set does not hold, where logprobs are renormalised over such sets.

Rounding moves a token across the edge of a set now and then, and other weights do more often. Its trainer
logprob is then -inf, exactly: no fault of the arithmetic, and nothing that a ratio could be made of.
"""

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence
from rlbatch.catalogue import finding
from rlbatch.errors import Finding
from rlbatch.soundness.distributions import in_force


def is_renormalised(evidence: Evidence) -> bool:
    """Whether the trainer's logprobs are over kept sets, and not of the whole softmax."""
    return evidence.comparable and evidence.provenance.keeps_set


def outside(evidence: Evidence) -> NDArray[np.bool_]:
    """[N]; trained tokens outside the trainer's kept set."""
    if not is_renormalised(evidence):
        return np.zeros(len(evidence.trained), bool)
    beyond: NDArray[np.bool_] = evidence.trained & (evidence.trainer == -np.inf)
    return beyond


def outside_finding(evidence: Evidence) -> Finding | None:
    """`outside-kept-set`, where there are such tokens."""
    tokens = np.flatnonzero(outside(evidence))
    if not len(tokens):
        return None
    return finding(
        "outside-kept-set",
        where=evidence.where(tokens),
        expected=f"sampled tokens inside the trainer's own kept set ({in_force(evidence.provenance)})",
        found=f"{len(tokens)} of {int(evidence.trained.sum())} trained tokens outside, "
        f"the first at inference logprob {evidence.inference[tokens[0]]:.4g}",
    )
