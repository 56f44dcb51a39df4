"""What tests of the C and the Triton statistics share: a batch of troubles, and how tables are compared."""

import math

import torch
from torch import Tensor

from rlbatch_kernels import STAT_COLUMNS


def troubled_batch(rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Trainer, inference and mask [rows, width]: a row with every kind of trouble, and clean ones."""

    def normal(*shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3

    inference = -normal(rows, width).abs()
    trainer = inference + 0.03 * normal(rows, width, seed=1)
    mask = torch.ones(rows, width, dtype=torch.bool)
    trouble = normal(width, seed=2)
    trainer[0, trouble > 5] = math.nan
    inference[0, trouble < -5] = -math.inf
    trainer[0, (trouble > 4) & (trouble < 5)] -= 25
    inference[0, (trouble > 3.5) & (trouble < 4)] = 0.0
    mask[0] = trouble > -3
    return trainer, inference, mask


def assert_equal_tables(found: Tensor, exact: Tensor) -> None:
    """Counts alike, sums to 1e-6 of the sum of their terms' sizes; `exact` is float64's."""
    sizes = exact.abs()
    sizes[:, STAT_COLUMNS.index("sum_log_ratio")] = sizes[:, STAT_COLUMNS.index("sum_abs_log_ratio")]
    # Of 1 less a share of the residual at lag 0, to which that of the share adds up.
    sizes[:, STAT_COLUMNS.index("max_window_lag_gain")] = 2.0
    error = torch.where(found == exact, 0.0, (found - exact).abs())
    assert (error <= 1e-6 * sizes).all()
    counts = [
        at
        for at, name in enumerate(STAT_COLUMNS)
        if name.startswith(("count", "num", "residual_p", "first_n"))
    ]
    assert torch.equal(found[:, counts], exact[:, counts])
