"""`RolloutLoader`: a store in, batches out; what it is told is in `options`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from rlbatch.batch import Batch, Layout
from rlbatch.collate import DEFAULT_PADDING, Padding
from rlbatch.errors import Finding, RecordError, SoundnessError
from rlbatch.loader.checking import misfit
from rlbatch.loader.figures import Figures
from rlbatch.loader.options import DEFAULT_CHECKS, DEFAULT_FEED, DEFAULT_STEPS, Checks, Feed, Steps
from rlbatch.loader.passes import Made, Pass, Worker
from rlbatch.loader.position import Position, from_state, to_state
from rlbatch.loader.prefetch import Demand, Prefetcher
from rlbatch.loader.ring import BufferRing
from rlbatch.loader.steps import Shape
from rlbatch.loader.store import Store
from rlbatch.loader.transfer import Transfer
from rlbatch.loader.worker_epochs import WorkerEpochs
from rlbatch.packing import Room, too_long

HELD_BY_CONSUMER = 2
"""Batches that a plain loop holds while it asks for the next: its variable, and the one on its way to it."""


class RolloutLoader(IterableDataset[Batch]):
    """Batches of a shard, or of a directory of shards: each sample once an epoch, or an error.

    Iterating is one epoch. `batch.step` says which optimiser step a batch is part of, what the whole step
    holds over all ranks (`num_loss_tokens` is what a token mean divides by), and whether the batch is its
    last. All ranks have as many batches; a filler has no trained token. A `DataLoader` takes it with
    `batch_size=None`. It has no length, for samples that are set aside would belie it: see `num_steps`.

    Args:
        path: the shard or the directory.
        layout: `padded` or `packed`.
        max_tokens: budget of one batch, padding included.
        padding: with what, on which side, and to multiples of what.
        checks: what samples must be, and what becomes of those that are not.
        steps: which samples share a step, in which order, and how ranks share it.
        feed: how far ahead batches are made, and where they go.

    Attributes:
        trainer_version: `policy_version` of the weights in the trainer; with `checks.max_version_lag` the
            caller sets it before asking for a step's first batch, alike on every rank.

    Raises:
        StorageError: the files cannot be used; at once, or before the step that needs them.
        SoundnessError: a sample is longer than the budget (at once), or has a fault (before its step).
        RecordError: options that contradict each other.

    Example:
        loader = RolloutLoader("rollouts", layout="packed", max_tokens=16384, steps=Steps(step_samples=512))
        for batch in loader:
            loss = token_losses(batch).sum() / batch.step.num_loss_tokens
    """

    def __init__(
        self,
        path: str | Path,
        *,
        layout: Layout,
        max_tokens: int,
        padding: Padding = DEFAULT_PADDING,
        checks: Checks = DEFAULT_CHECKS,
        steps: Steps = DEFAULT_STEPS,
        feed: Feed = DEFAULT_FEED,
    ) -> None:
        room = Room(
            layout=layout,
            max_tokens=max_tokens,
            sequence_multiple=padding.sequence_multiple,
            row_multiple=padding.row_multiple,
        )
        self._shape = Shape(room=room, padding=padding)
        self._checks = checks
        self._steps = steps
        self._feed = feed
        _require_apart(Path(path), checks)
        self._store = Store(Path(path), steps)
        # Where the next pass begins, and where the consumer stands in the present one.
        self._start = Position()
        self._position = Position()
        self._num_passes = 0
        self._worker_epochs = None if steps.seed is None else WorkerEpochs()
        self._figures = Figures(max_tokens)
        self.trainer_version: int | None = None
        if self._store.is_complete and checks.on_fault == "error":
            self._require_fit()

    @property
    def num_steps(self) -> int | None:
        """Steps of the present epoch, those counted of which nothing is left; None while the store grows."""
        steps = self._store.steps_of(self._position.epoch)
        return None if steps is None else len(steps)

    def __iter__(self) -> "BatchIterator":
        """One epoch, or what is left of it where a state was loaded; an abandoned pass begins anew."""
        worker = get_worker_info()
        self._check_iteration(in_worker=worker is not None)
        if worker is not None:
            self._require_new_epoch(worker.seed - worker.id)
        transfer = Transfer(self._feed.device)
        one_pass = Pass(
            store=self._store,
            shape=self._shape,
            checks=self._checks,
            steps=self._steps,
            ring=BufferRing(num_spare=self._feed.prefetch + HELD_BY_CONSUMER, pinned=transfer.wants_pinned),
            transfer=transfer,
            worker=Worker() if worker is None else Worker(index=worker.id, num_workers=worker.num_workers),
            trainer_version=lambda: self.trainer_version,
        )
        start = self._position = self._start
        self._start = Position(epoch=start.epoch)
        self._num_passes += 1
        handed_over = partial(self._handed_over, self._num_passes)
        return BatchIterator(handed_over, one_pass, start, depth=self._feed.prefetch)

    @property
    def epoch(self) -> int:
        """The epoch of the present pass, or of the next one where none has begun."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch; a state that was loaded for it stays in force.

        Needed before each pass where a `DataLoader` makes new workers for it: those begin with a copy of this
        loader, and neither its state nor its metrics move on here.
        """
        if self._worker_epochs is not None:
            self._worker_epochs.told(epoch)
        if epoch != self._start.epoch:
            self._start = self._position = Position(epoch=epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer stands, however far ahead batches were made; plain values, fit for JSON."""
        return to_state(self._position, options=self._plan_options(), store=self._store.fingerprint())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where the state was saved: with the batch that would have come.

        With another number of ranks it goes on with the samples that were left, each once. It is each rank's
        own state, or that of any other rank that had as many batches.

        Raises:
            RecordError: it is no state, or one of a loader with other options.
            StorageError: store-changed, the store is another one.
        """
        position, store = from_state(state, options=self._plan_options())
        self._store.require_same(*store)
        steps = self._store.steps_of(position.epoch)
        if steps is not None and position.step > len(steps):
            raise RecordError(
                f"load_state_dict: expected a step of 0 to {len(steps)} of epoch {position.epoch}, found "
                f"{position.step}"
            )
        if self._worker_epochs is not None:
            self._worker_epochs.told(position.epoch)
        self._start = self._position = position

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What was doubtful in the steps so far: the newest thousand findings."""
        return self._figures.warnings

    def metrics(self) -> dict[str, float]:
        """What was handed over since the loader was made, for a trainer to log: `Figures.metrics`."""
        return self._figures.metrics()

    def _handed_over(self, number: int, made: Made, wait_s: float) -> None:
        self._figures.waited(wait_s)
        if made.sent is None:
            self._figures.add_found(made.counts.found)
        else:
            self._figures.add(made.counts)
        # The state is that of the newest pass; an iterator of one that was abandoned does not move it.
        if number != self._num_passes:
            return
        if made.sent is None:
            self._start = made.after
            worker = get_worker_info()
            if worker is not None and self._worker_epochs is not None:
                self._worker_epochs.passed(self._position.epoch, worker.seed - worker.id)
        self._position = made.after

    def _plan_options(self) -> dict[str, Any]:
        """What the plans depend on; a state is of no use to a loader that plans otherwise."""
        steps, checks = self._steps, self._checks
        return {
            "room": asdict(self._shape.room),
            "padding": asdict(self._shape.padding),
            "step_samples": steps.step_samples,
            "seed": steps.seed,
            "keep_groups": steps.keep_groups,
            "keeps_trajectories": self._store.keeps_trajectories,
            "cost": asdict(steps.cost),
            "purpose": checks.purpose,
            "vocab_size": checks.vocab_size,
            "group_size": checks.group_size,
            "max_version_lag": checks.max_version_lag,
            "on_fault": checks.on_fault,
        }

    def _require_fit(self) -> None:
        lengths = self._store.reader.lengths.tolist()
        excess = too_long(lengths, self._shape.room)
        if excess:
            origins = zip(excess, self._store.origins(excess), strict=True)
            raise SoundnessError.of(
                *(misfit(origin, self._shape.room, f"{lengths[index]} tokens") for index, origin in origins)
            )

    def _require_new_epoch(self, base_seed: int) -> None:
        epoch = self._start.epoch
        if self._worker_epochs is not None and self._worker_epochs.has_passed(epoch, base_seed):
            raise RecordError(
                f"RolloutLoader: expected another epoch than {epoch}, which worker processes have passed and "
                "would shuffle alike again; call set_epoch before each pass, or keep the workers with "
                "persistent_workers=True"
            )

    def _check_iteration(self, *, in_worker: bool) -> None:
        by_version = self._checks.max_version_lag is not None
        if by_version and self.trainer_version is None:
            raise RecordError(
                "RolloutLoader.trainer_version: expected the version of the trainer's weights, since "
                "Checks.max_version_lag is given, found None; set it before asking for a batch"
            )
        if in_worker and (by_version or self._feed.device is not None):
            raise RecordError(
                "RolloutLoader: expected no Feed.device and no Checks.max_version_lag in a worker process, "
                "which has no device and is not told the trainer's version; iterate in the trainer's process"
            )


def _require_apart(store: Path, checks: Checks) -> None:
    """Refuse to write what is set aside among the samples that are read: it would be read as samples."""
    if checks.quarantine is None:
        return
    aside, store = Path(checks.quarantine).resolve(), store.resolve()
    if aside == store or aside in store.parents or store in aside.parents:
        raise RecordError(
            f"Checks.quarantine: expected a directory apart from the store {str(store)!r}, found "
            f"{str(aside)!r}; name a directory that neither holds the store nor lies in it"
        )


class BatchIterator(Iterator[Batch]):
    """One pass of a loader, made ahead where it is told to; closes itself when nobody holds it any more."""

    def __init__(
        self,
        handed_over: Callable[[Made, float], None],
        one_pass: Pass,
        start: Position,
        *,
        depth: int,
    ) -> None:
        self._handed_over = handed_over
        self._transfer = one_pass.transfer
        self._demand = Demand()
        self._ahead: Prefetcher[Made] | None = None
        self._source: Iterator[Made]
        self._error: Exception | None = None
        if depth:
            self._source = self._ahead = Prefetcher(
                lambda demand: one_pass.batches(start, demand), depth=depth
            )
        else:
            self._source = one_pass.batches(start, self._demand)

    def __next__(self) -> Batch:
        # Behind an error a generator ends, and the epoch with it, as if nothing had been wrong.
        if self._error is not None:
            raise self._error
        began = perf_counter()
        try:
            made = next(self._source)
        except StopIteration:
            raise
        except Exception as error:
            self._error = error
            raise
        self._handed_over(made, perf_counter() - began)
        if made.sent is None:
            raise StopIteration
        return self._transfer.receive(made.sent)

    def close(self) -> None:
        """Let the loader's thread end, and wait for it; what was made ahead is dropped."""
        self._demand.stopped.set()
        if self._ahead is not None:
            self._ahead.close()
