"""The kept set of one position, token by token in plain Python, as vLLM 0.32's sampler defines it."""

import math


def kept_by_hand(scaled: list[float], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """Ids that are kept of logits over temperature, in float64: min_p, then top_k, then top_p of the rest."""
    ids = [i for i, value in enumerate(scaled) if value > -math.inf]
    best = max(scaled)
    if min_p > 0:
        ids = [i for i in ids if math.exp(scaled[i] - best) >= min_p]
    if 0 < top_k < len(scaled) and top_k < len(ids):
        kth = sorted((scaled[i] for i in ids), reverse=True)[top_k - 1]
        ids = [i for i in ids if scaled[i] >= kth]
    if top_p < 1:
        total = math.fsum(math.exp(scaled[i] - best) for i in ids)
        rising = sorted(ids, key=lambda i: (scaled[i], i))
        mass, removed = 0.0, set()
        # The last is never removed.
        for i in rising[:-1]:
            mass += math.exp(scaled[i] - best) / total
            if mass <= 1 - top_p:
                removed.add(i)
        ids = [i for i in ids if i not in removed]
    return ids
