"""One copy of each batch to the device, on a stream of its own where that is CUDA."""

from collections import deque
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from rlbatch.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sent:
    """A batch on its way."""

    batch: Batch
    arrived: torch.cuda.Event | None
    """None where there is nothing to wait for."""


class Transfer:
    """Copies to one device; `send` on the loader's thread, `receive` on the consumer's."""

    def __init__(self, device: torch.device | str | None) -> None:
        self._device = None if device is None else torch.device(device)
        self._is_cuda = self._device is not None and self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        # Batches on the host whose copies may still be running: their memory must not be used again yet.
        self._leaving: deque[tuple[torch.cuda.Event, Batch]] = deque()

    @property
    def wants_pinned(self) -> bool:
        """Copies run beside the CPU only from page-locked memory."""
        return self._is_cuda

    def send(self, batch: Batch) -> Sent:
        """Start the copy."""
        while self._leaving and self._leaving[0][0].query():  # type: ignore[no-untyped-call]
            self._leaving.popleft()
        if self._stream is None:
            return Sent(batch=batch if self._device is None else batch.to(self._device), arrived=None)
        with torch.cuda.stream(self._stream):
            moved = batch.to(self._stream.device, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        self._leaving.append((arrived, batch))
        return Sent(batch=moved, arrived=arrived)

    def receive(self, sent: Sent) -> Batch:
        """The batch, in order for whatever the caller's stream does next; the CPU does not wait."""
        if sent.arrived is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(sent.arrived)
            # Its memory was allocated on the other stream, and is in use on this one from now on.
            buffer = sent.batch.buffer
            for tensor in tree_leaves(sent.batch) if buffer is None else [buffer]:
                tensor.record_stream(current)
        return sent.batch
