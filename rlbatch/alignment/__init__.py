"""Trainer logprobs against inference logprobs: the gate before backprop."""

from rlbatch.alignment.gate import Alignment, require_aligned
from rlbatch.alignment.judge import Judge, Verdict
from rlbatch.alignment.limits import Limits

__all__ = ["Alignment", "Judge", "Limits", "Verdict", "require_aligned"]
