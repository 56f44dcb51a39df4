"""Stored samples in, checked batches out, ahead of the trainer. Knows nothing of models or losses.

options      what can be chosen
order        which samples are a step
store        where they are read from, complete or still being written
checking     what is wrong with them; what is set aside goes to `quarantine`
steps        the step's plan: the batches of every rank, and the normalisers
position     where a pass stands, and how that is saved
passes       one pass over the store, batch by batch, from any position
prefetch     that, on a thread of its own
ring         reused host memory under the batches
transfer     one copy of each batch to the device
figures      what a trainer can log
loader       `RolloutLoader`, which joins them
worker_epochs  which epoch worker processes have passed
conventions  what `torch.utils.data.DataLoader` and its like expect
"""

from rlbatch.loader.conventions import Collator
from rlbatch.loader.loader import RolloutLoader
from rlbatch.loader.options import Checks, Feed, Steps

__all__ = ["Checks", "Collator", "Feed", "RolloutLoader", "Steps"]
