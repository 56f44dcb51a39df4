"""`StepTotals`: what a whole step holds, over all ranks and micro-batches. Every rank derives the same."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """The normalisers of one optimiser step; fillers count nowhere."""

    epoch: int
    step: int
    """Counted from 0 in its epoch."""
    num_batches: int
    """Micro-batches of each rank, fillers included."""
    num_samples: int
    num_trajectories: int
    """Each trajectory once, however many samples it became: at its first."""
    num_tokens: int
    """Without padding."""
    num_loss_tokens: int
    """Trained tokens: what a token mean divides by."""
