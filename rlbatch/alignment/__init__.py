"""Trainer logprobs against inference logprobs: the gate before backprop."""

from rlbatch.alignment.gate import Alignment, require_aligned
from rlbatch.alignment.judge import Judge, Verdict
from rlbatch.alignment.limits import Limits
from rlbatch.alignment.logits import LogitsFor
from rlbatch.alignment.measure import Measured, measure

__all__ = ["Alignment", "Judge", "Limits", "LogitsFor", "Measured", "Verdict", "measure", "require_aligned"]
