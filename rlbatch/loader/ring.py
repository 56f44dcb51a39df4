"""Host memory that batches are laid in and that is used again: no page is faulted in or pinned twice.

A buffer comes back when the last tensor that views it is gone, whoever held it: the consumer, a queue, or a
copy that is still running. So no batch changes under the hands that hold it, and a consumer that keeps
batches only makes the ring give out fresh memory. Knows bytes; nothing of batches.
"""

import weakref
from collections import deque

import torch
from torch import Tensor


class BufferRing:
    """Gives out flat uint8 buffers and takes them back by itself.

    Args:
        num_spare: so many buffers that nobody holds are kept; more are freed.
        pinned: page-locked memory, from which a CUDA device copies without the CPU.

    Example:
        collate(samples, layout="packed", allocate=BufferRing(num_spare=3, pinned=False).allocate)
    """

    def __init__(self, *, num_spare: int, pinned: bool) -> None:
        # A deque's ends are safe from any thread without a lock, which a finaliser could wait for forever.
        self._spare: deque[Tensor] = deque(maxlen=num_spare)
        self._pinned = pinned
        self._size = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """A buffer of at least `num_bytes`; what it holds is left over from a batch before."""
        slot = self._take(num_bytes)
        # Tensors made of this array keep it alive, and nothing else does.
        lease = slot.numpy()[:]
        weakref.finalize(lease, self._give_back, slot).atexit = False
        return torch.from_numpy(lease)

    def _take(self, num_bytes: int) -> Tensor:
        self._size = max(self._size, num_bytes)
        while self._spare:
            try:
                slot = self._spare.pop()
            except IndexError:
                break
            if slot.numel() >= num_bytes:
                return slot
        # As large as the largest so far: batches of one loader differ little, and growing costs twice.
        return torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pinned)

    def _give_back(self, slot: Tensor) -> None:
        self._spare.append(slot)
