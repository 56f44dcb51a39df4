"""Which segments are worth a look: the table of segments says the same as their windows, one by one."""

import numpy as np
import pytest
import torch
from builders import sample

from rlbatch.alignment.inquiry import Inquiry
from rlbatch.alignment.measure import measure
from rlbatch.collate import collate

NUM_ROWS = 24


def spoil(how, inference, rng):
    """The engine's list with a fault in a stretch of up to 100 tokens that begins anywhere."""
    values = inference.copy()
    start = int(rng.integers(0, max(1, len(values) - 4)))
    stop = min(len(values), start + int(rng.integers(3, 100)))
    if how == "shifted":
        lag = int(rng.choice([-2, -1, 1, 2]))
        values[start:stop] = np.roll(inference, -lag)[start:stop]
    elif how == "louder":
        values[start:stop] -= rng.exponential(10 ** rng.uniform(-2.5, 0), stop - start)
    elif how == "zero":
        values[start] = 0.0
    elif how == "not finite":
        values[start] = -np.inf
    elif how == "wild":
        values[start] -= 3.0
    elif how == "positive":
        values[start] = 0.5
    return values


def of_windows(trainer, inference, mask, floor):
    """Whether a segment is suspect anyway, and whether it is where it may be compared: window by window."""
    anyway = comparable = False
    for at in range(0, len(mask), 64):
        t, i, on = trainer[at : at + 64], inference[at : at + 64], mask[at : at + 64]
        means = {}
        for lag in (-2, -1, 0, 1, 2):
            ours = np.arange(max(0, -lag), min(len(t), len(t) - lag))
            ours = ours[on[ours] & on[ours + lag] & np.isfinite(i[ours]) & np.isfinite(t[ours + lag])]
            if len(ours):
                means[lag] = np.minimum(np.abs(i[ours] - t[ours + lag]), 4.0).mean()
        zero, both = means.pop(0, 0.0), on & np.isfinite(t) & np.isfinite(i)
        anyway |= bool((on & ~np.isfinite(t)).any() or (i[both] > 1e-3).any())
        anyway |= zero >= 0.02 and min(means.values(), default=np.inf) < 0.25 * zero
        comparable |= bool((on & ~np.isfinite(i)).any() or ((i[both] == 0) & (t[both] < -1e-3)).any())
        comparable |= bool((np.abs(t - i)[both] > 2.5).any())
        comparable |= zero >= (0.1 if floor is None else max(0.1, 2.5 * floor))
    return anyway, comparable


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("noise", [0.0, 0.003, 0.05])
@pytest.mark.parametrize("how", ["clean", "shifted", "louder", "zero", "not finite", "wild", "positive"])
def test_the_table_of_segments_makes_suspect_what_their_windows_do(how, noise, layout) -> None:
    rng = np.random.default_rng([len(how), int(1000 * noise)])
    lengths = rng.integers(1, 400, NUM_ROWS).tolist()
    batch = collate(
        [
            sample([1, 2], [3] * length, [-1.0] * length, trajectory_id=f"{row}")
            for row, length in enumerate(lengths)
        ],
        layout=layout,
    )
    batch.loss_mask.logical_and_(torch.from_numpy(rng.random(batch.shape) < 0.97))
    trainer = torch.zeros(batch.shape)
    sides = []
    for row, (row_of, start, stop, _) in enumerate(batch.segments.tolist()):
        here = (row_of, slice(start, stop))
        good = -rng.exponential(1.0, stop - start)
        reported = spoil(how, good, rng) if row % 3 == 0 else good
        batch.inference_logprobs[here] = torch.from_numpy(reported)
        trainer[here] = torch.from_numpy(good + noise * rng.standard_normal(len(good)))
        sides.append((trainer[here], batch.inference_logprobs[here], batch.loss_mask[here]))
    comparable = rng.random(NUM_ROWS) < 0.8
    measured = measure(batch, trainer)
    inquiry = Inquiry(
        measured=measured,
        table=measured.table(),
        comparable=comparable,
        ages=np.zeros(NUM_ROWS, np.int64),
        logits_for=None,
    )
    floor = inquiry._floor()
    looked = [
        of_windows(*(side.double().numpy() for side in three[:2]), three[2].numpy(), floor) for three in sides
    ]
    expected = [anyway or (may and told) for (anyway, told), may in zip(looked, comparable, strict=True)]
    expected |= comparable & inquiry._outliers(floor)
    assert inquiry._suspect().tolist() == list(expected)
    # A stretch that is only a little louder is no suspect; other faults are, of those that are compared.
    assert any(expected) == (how != "clean")
