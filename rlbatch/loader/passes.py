"""One pass over a store, batch by batch, from any position. Runs on the loader's thread."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlbatch.loader.ahead import Verifier
from rlbatch.loader.figures import Counts, Found
from rlbatch.loader.options import Checks, Steps
from rlbatch.loader.position import Position
from rlbatch.loader.prefetch import Demand
from rlbatch.loader.quarantine import set_aside
from rlbatch.loader.ring import BufferRing
from rlbatch.loader.steps import Shape, Step, load_step, make_batch, plan_step
from rlbatch.loader.store import Store
from rlbatch.loader.transfer import Sent, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A batch, and where the pass stands once it is handed over; without a batch, the end."""

    sent: Sent | None
    after: Position
    counts: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Which batches of its rank a process makes: every `num_workers`-th, as DataLoader collects them."""

    index: int = 0
    num_workers: int = 1

    def makes(self, position: Position) -> bool:
        """Whether the batch after this position is its own."""
        return position.num_batches % self.num_workers == self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What is needed to make batches."""

    store: Store
    shape: Shape
    checks: Checks
    steps: Steps
    ring: BufferRing
    transfer: Transfer
    worker: Worker
    trainer_version: Callable[[], int | None]

    def batches(self, start: Position, demand: Demand) -> Iterator[Made]:
        """Every batch of the epoch from `start` on, then the end.

        Raises:
            StorageError: the store cannot be read.
            SoundnessError: a sample has a fault, and `on_fault` is `error`.
        """
        with Verifier() as ahead:
            yield from self._batches(start, demand, ahead)

    def _batches(self, start: Position, demand: Demand, ahead: Verifier) -> Iterator[Made]:
        position, found = start, Found()
        while self._judges(position, demand):
            position = self._judged(position)
            indices = self.store.step(position.epoch, position.step, demand.stopped)
            if indices is None:
                yield Made(sent=None, after=Position(epoch=position.epoch + 1), counts=Counts(found=found))
                return
            step = self._load(indices, position)
            ahead.begin(self.store.shards_of(position.epoch, position.step + 1))
            found = found.plus(step.found)
            position = position.begun(self.steps.num_ranks)
            mine = plan_step(step, self.shape, self.steps, position)[self.steps.rank]
            for members in mine[position.parts[-1][1] :]:
                before, position = position, position.after_batch()
                if self.worker.makes(before):
                    # Before, since a file that was cut short kills who reads it; behind, for what was read.
                    step.require_unchanged(members)
                    made = self._make(step, mine, before, found)
                    step.require_unchanged(members)
                    yield made
                    found = Found()
            position = position.after_step()
            step.release()
            # Last, since where it gives up early, the loop ends too.
            ahead.finish(demand.stopped)

    def _judges(self, position: Position, demand: Demand) -> bool:
        """Wait for the version that a step is to be judged by; False where nobody asks for it any more.

        That is the one the trainer has when it asks for the step: so all ranks judge alike, however far ahead
        each has read.
        """
        if self.checks.max_version_lag is None or position.parts:
            return not demand.stopped.is_set()
        return demand.wait_until_wanted()

    def _judged(self, position: Position) -> Position:
        if self.checks.max_version_lag is None or position.parts:
            return position
        return replace(position, trainer_version=self.trainer_version())

    def _load(self, indices: Sequence[int], position: Position) -> Step:
        candidates = self.store.read(indices)
        step = load_step(
            candidates, self.checks, self.shape, self.steps, trainer_version=position.trainer_version
        )
        # All ranks and workers set the same samples aside, so that one of them writes.
        writes = self.steps.rank == 0 and self.worker.index == 0
        if step.faults and writes and self.checks.quarantine is not None:
            set_aside(
                Path(self.checks.quarantine),
                step.set_aside.samples,
                origins=step.set_aside.origins,
                findings=step.faults,
                epoch=position.epoch,
                step=position.step,
            )
        return step

    def _make(self, step: Step, mine: Sequence[Sequence[int]], before: Position, found: Found) -> Made:
        """The batch behind `before`, on its way; what was found goes with the first one made after it."""
        index = before.parts[-1][1]
        batch = make_batch(
            step,
            mine[index],
            self.shape,
            info=replace(
                step.totals, epoch=before.epoch, step=before.step, index=index, num_batches=len(mine)
            ),
            purpose=self.checks.purpose,
            allocate=self.ring.allocate,
        )
        is_last = index == len(mine) - 1
        return Made(
            sent=self.transfer.send(batch),
            after=before.after_batch().after_step() if is_last else before.after_batch(),
            counts=Counts(
                num_samples=len(mine[index]),
                num_tokens=sum(len(step.samples[at]) for at in mine[index]),
                num_loss_tokens=batch.num_loss_tokens,
                num_fillers=int(not mine[index]),
                found=found,
            ),
        )
