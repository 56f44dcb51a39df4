"""What `torch.utils.data.DataLoader`, and trainers built on it, expect of a collate function."""

from collections.abc import Sequence

from rlbatch.batch import Batch, Layout
from rlbatch.collate import DEFAULT_PADDING, Padding, collate
from rlbatch.records import Purpose, Sample
from rlbatch.soundness import require_sound


class Collator:
    """Checks and collates what a `DataLoader` over a reader picks; its `collate_fn`.

    Without one, `DataLoader` joins what it picks itself, which it cannot do with samples.
    It pickles, so that worker processes can have it. It knows nothing of steps, ranks and budgets, which are
    the caller's then; `RolloutLoader` knows them. Raw and processed logprobs never share a batch: where a
    store has both, `RolloutLoader` sorts them, and a `DataLoader` needs a `Subset` of one kind.

    Args:
        layout: `padded` or `packed`.
        purpose: `train`, or `audit` for raw, greedy and incomparable turns too.
        vocab_size: rows of the model's head; ids beyond it are an error.
        padding: with what, on which side, and to multiples of what.

    Example:
        DataLoader(open_reader("rollouts"), batch_size=8, collate_fn=Collator(layout="padded"), num_workers=2)

        raw = [at for at, sample in enumerate(reader) if sample.logprobs_modes == {"raw"}]
        DataLoader(Subset(reader, raw), batch_size=8, shuffle=True, collate_fn=Collator(layout="padded"))
    """

    def __init__(
        self,
        *,
        layout: Layout,
        purpose: Purpose = "train",
        vocab_size: int | None = None,
        padding: Padding = DEFAULT_PADDING,
    ) -> None:
        self._layout: Layout = layout
        self._purpose: Purpose = purpose
        self._vocab_size = vocab_size
        self._padding = padding

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """One batch.

        Raises:
            SoundnessError: a sample has a fault.
            RecordError: as `collate`.
        """
        require_sound(samples, purpose=self._purpose, vocab_size=self._vocab_size)
        return collate(samples, layout=self._layout, purpose=self._purpose, padding=self._padding)

    def torch_call(self, samples: Sequence[Sample]) -> Batch:
        """The same under the name that transformers' data collators have."""
        return self(samples)
