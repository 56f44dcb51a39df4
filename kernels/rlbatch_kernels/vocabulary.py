"""`Vocabulary`: which columns a softmax runs over, and whose they are. All, and one's own, unless overridden.

Kept sets (`truncation`) leave columns out, shards (`vocab_parallel`) hold some of them; the two are the only
places where the ops differ for them. Knows nothing of where logits come from.
"""

from torch import Tensor

from rlbatch_kernels.softmax import Softmax


class Vocabulary:
    """Every column, all of them here.

    Attributes:
        first_id: the id that column 0 stands for.
        excludes_nothing: whether `learn` and `exclude` may be left out.
        needs_whole_rows: whether all columns of a row must be seen at once before any is excluded.
    """

    first_id: int = 0
    excludes_nothing: bool = True
    needs_whole_rows: bool = False

    def learn(self, logits: Tensor, rows: slice) -> None:
        """See some rows [n, V] whole where `needs_whole_rows`; once for each row, before `exclude`."""

    def exclude(self, logits: Tensor, rows: slice, first_column: int) -> None:
        """Put -inf where a tile [n, v] lies outside, in place; NaN and +inf stay, to be seen."""

    def complete(self, softmax: Softmax) -> None:
        """Make the sums over the columns that were added those over all, in place."""

    def upstream(self, softmax: Softmax, grad_logprobs: Tensor) -> Tensor:
        """What of the gradient [N] float64 to the logprobs reaches the logits."""
        return grad_logprobs

    def complete_gradient(self, grad_hidden: Tensor) -> None:
        """Make a gradient from the columns that are here that from all, in place."""
