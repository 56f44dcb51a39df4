"""`StepInfo`: what a whole optimiser step holds, over all ranks, and one batch's place in it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """Every rank derives the same figures, but for fillers, which count nowhere."""

    epoch: int
    step: int
    """Counted from 0 in its epoch."""
    index: int
    """Place of this micro-batch among those of its rank in this step, counted from 0."""
    num_batches: int
    """Micro-batches of each rank in this step, fillers included."""
    num_samples: int
    num_trajectories: int
    """Distinct ones among the samples of the step: what a mean over trajectories divides by. A loader keeps
    the samples of one together, but for stores that it follows; steps that share one count it each."""
    num_tokens: int
    """Without padding."""
    num_loss_tokens: int
    """Trained tokens: what a token mean divides by."""
    trainer_version: int | None = None
    """The version that the age of the step's samples was judged by; None where it was not judged."""
    samples_crc32: int | None = None
    """Of the step's sample ids. Ranks that share a step and differ here lose and double samples. None where
    one rank has the step to itself."""

    @property
    def is_last(self) -> bool:
        """After this micro-batch comes `optimizer.step()`."""
        return self.index == self.num_batches - 1
