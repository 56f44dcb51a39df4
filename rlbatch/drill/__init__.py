"""The fire drill: every known fault planted into copies of good rollouts, and what is said of each.

Proof on one's own model, dtype and rollouts that the gate names what is wrong and is silent where nothing is.
"""

from rlbatch.drill.cases import DrillOptions, one_case, the_faults
from rlbatch.drill.judging import Trainer, findings_of
from rlbatch.drill.noise import TAILS, Noise, Tails
from rlbatch.drill.pool import Pool, load_pool
from rlbatch.drill.run import run_drill
from rlbatch.drill.scores import Scores
from rlbatch.drill.tally import Drilled, Tally

__all__ = [
    "DrillOptions",
    "Drilled",
    "Noise",
    "Pool",
    "Scores",
    "TAILS",
    "Tails",
    "Tally",
    "Trainer",
    "findings_of",
    "load_pool",
    "one_case",
    "run_drill",
    "the_faults",
]
