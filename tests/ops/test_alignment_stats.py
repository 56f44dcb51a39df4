"""`alignment_stats`: worked by hand, against a loop over tokens, and independent of all that surrounds."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlbatch_kernels import (
    LAGS,
    RESIDUAL_CLIP,
    STAT_COLUMNS,
    ShapeError,
    alignment_stats,
    alignment_stats_and_ratio,
    column,
    count_outside,
    stats,
)

pytestmark = pytest.mark.usefixtures("backend")

RELATIVE = {"torch": 5e-8, "c": 1e-6, "triton": 1e-6}
"""Error of a sum, of the sum of its terms' sizes. 5e-8: float64, less what the series of k3 leaves out just
below 1/2. 1e-6: float32 within a block."""

NAN, INF = math.nan, math.inf


def row_of(
    trainer: Sequence[float],
    inference: Sequence[float],
    mask: Sequence[bool] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """The statistics of one row that is one segment, by column."""
    trained = [True] * len(trainer) if mask is None else list(mask)
    table = alignment_stats(
        torch.tensor([list(trainer)], device=device, dtype=torch.float32),
        torch.tensor([list(inference)], device=device, dtype=torch.float32),
        torch.tensor([trained], device=device, dtype=torch.bool),
        torch.tensor([[0, 0, len(trained), 0]], dtype=torch.int32, device=device),
    )
    assert table.dtype == torch.float64
    assert table.device.type == torch.device(device).type
    return dict(zip(STAT_COLUMNS, table[0].tolist(), strict=True))


def by_loop(trainer: Tensor, inference: Tensor, mask: Tensor, segments: Tensor) -> list[list[float]]:
    """The same table, token by token in Python floats, as the contract words it."""
    return [_segment_by_loop(trainer, inference, mask, *segment[:3]) for segment in segments.tolist()]


def _segment_by_loop(
    trainer: Tensor, inference: Tensor, mask: Tensor, row: int, start: int, stop: int
) -> list[float]:
    tokens = [(trainer[row, t].item(), inference[row, t].item()) for t in range(start, stop)]
    trained = [bool(mask[row, t]) for t in range(start, stop)]
    seen = [token for token, on in zip(tokens, trained, strict=True) if on]
    both = [(t, i) for t, i in seen if math.isfinite(t) and math.isfinite(i)]
    logs = [t - i for t, i in both]
    # In Python floats expm1(x) - x keeps ten digits down to 1e-6.
    klds = [math.expm1(max(-20.0, min(20.0, x))) - x for x in logs]
    ratios = [math.exp(max(-20.0, min(20.0, x))) for x in logs]
    values = [
        len(seen),
        len(both),
        math.fsum(logs),
        math.fsum(map(abs, logs)),
        math.fsum(x * x for x in logs),
        math.fsum(klds),
        math.fsum(min(kld, 1.0) for kld in klds),
        math.fsum(ratios),
        math.fsum(ratio * ratio for ratio in ratios),
        max(map(abs, logs), default=0.0),
        max((i for _, i in both), default=-INF),
        sum(i == 0 and t < -0.001001 for t, i in both),
        sum(i >= -0.693148 and t < i - 2 for t, i in both),
        sum(not math.isfinite(t) for t, _ in seen),
        sum(not math.isfinite(i) for _, i in seen),
    ]
    sums, pairs = [], []
    for lag in (-2, -1, 0, 1, 2):
        residuals = []
        for t in range(len(tokens)):
            if not (0 <= t + lag < len(tokens) and trained[t] and trained[t + lag]):
                continue
            ours, theirs = tokens[t][1], tokens[t + lag][0]
            if math.isfinite(ours) and math.isfinite(theirs):
                residuals.append(min(abs(ours - theirs), 4.0))
        sums.append(math.fsum(residuals))
        pairs.append(len(residuals))
    windows = [slice(at, at + 64) for at in range(0, len(tokens), 64)]
    first = [abs(t - i) for t, i in _compared(tokens[:64], trained[:64])]
    residuals, gains = [0.0], [0.0]
    for window in windows:
        residual, gain = _window_by_loop(tokens[window], trained[window])
        residuals.append(residual)
        gains.append(gain)
    last = [len(first), math.fsum(first), max(residuals), max(gains)]
    return [float(value) for value in values + sums + pairs + last]


def _compared(tokens: Sequence[tuple[float, float]], trained: Sequence[bool]) -> list[tuple[float, float]]:
    return [
        (t, i)
        for (t, i), on in zip(tokens, trained, strict=True)
        if on and math.isfinite(t) and math.isfinite(i)
    ]


def _window_by_loop(tokens: Sequence[tuple[float, float]], trained: Sequence[bool]) -> tuple[float, float]:
    """Residual at lag 0, and the share of it that the best other lag saves; zeros below 0.02 nats."""
    means = {}
    for lag in (-2, -1, 0, 1, 2):
        found = [
            min(abs(tokens[t][1] - tokens[t + lag][0]), 4.0)
            for t in range(max(0, -lag), min(len(tokens), len(tokens) - lag))
            if trained[t]
            and trained[t + lag]
            and math.isfinite(tokens[t][1])
            and math.isfinite(tokens[t + lag][0])
        ]
        if found:
            means[lag] = math.fsum(found) / len(found)
    zero = means.pop(0, 0.0)
    if zero < 0.02:
        return 0.0, 0.0
    return zero, 1 - min(means.values(), default=math.inf) / zero


def random_batch(seed: int, rows: int = 4, width: int = 60) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Close logprobs with every kind of trouble in them, and segments of all lengths, empty ones too."""
    generator = torch.Generator().manual_seed(seed)

    def some(share: float) -> Tensor:
        return torch.rand(rows, width, generator=generator) < share

    inference = -3 * torch.rand(rows, width, generator=generator)
    trainer = inference + 0.1 * torch.randn(rows, width, generator=generator)
    trainer = torch.where(some(0.1), trainer - 30 * torch.rand(rows, width, generator=generator), trainer)
    inference[some(0.05)] = 0.0
    inference[some(0.05)], trainer[some(0.05)] = NAN, -INF
    mask, numbers = some(0.7), random.Random(seed)
    segments = []
    for row in range(rows):
        cuts = sorted(numbers.choices(range(width + 1), k=7))
        for turn, (start, stop) in enumerate(pairwise(cuts)):
            segments.append((row, start, stop, turn))
    numbers.shuffle(segments)
    return trainer, inference, mask, torch.tensor(segments, dtype=torch.int32)


def test_columns_are_those_of_the_contract() -> None:
    contract = """
        count num_compared sum_log_ratio sum_abs_log_ratio sum_sq_log_ratio sum_k3 sum_k3_capped sum_ratio
        sum_sq_ratio max_abs_log_ratio max_inference num_zeros num_confident_disagreements
        num_trainer_not_finite num_inference_not_finite
        residual_sum_-2 residual_sum_-1 residual_sum_0 residual_sum_1 residual_sum_2
        residual_pairs_-2 residual_pairs_-1 residual_pairs_0 residual_pairs_1 residual_pairs_2
        first_num_compared first_sum_abs_log_ratio max_window_residual max_window_lag_gain
    """
    assert tuple(contract.split()) == STAT_COLUMNS
    assert LAGS == (-2, -1, 0, 1, 2)
    assert RESIDUAL_CLIP == 4.0


def test_two_tokens_worked_by_hand(device: torch.device) -> None:
    found = row_of([-1.0, -2.0], [-1.5, -2.0], device=device)
    # log_ratio 0.5 and 0. k3 = e^0.5 - 1.5 = 0.1487213. ratios 1.6487213 and 1, squares e = 2.7182818 and 1.
    expected = {
        "count": 2,
        "num_compared": 2,
        "sum_log_ratio": 0.5,
        "sum_abs_log_ratio": 0.5,
        "sum_sq_log_ratio": 0.25,
        "sum_k3": 0.1487213,
        "sum_k3_capped": 0.1487213,
        "sum_ratio": 2.6487213,
        "sum_sq_ratio": 3.7182818,
        "max_abs_log_ratio": 0.5,
        "max_inference": -1.5,
        "num_zeros": 0,
        "num_confident_disagreements": 0,
        "num_trainer_not_finite": 0,
        "num_inference_not_finite": 0,
        "residual_sum_-2": 0,
        # inference[1] with trainer[0]: |-2 + 1|
        "residual_sum_-1": 1.0,
        "residual_sum_0": 0.5,
        # inference[0] with trainer[1]: |-1.5 + 2|
        "residual_sum_1": 0.5,
        "residual_sum_2": 0,
        "residual_pairs_-2": 0,
        "residual_pairs_-1": 1,
        "residual_pairs_0": 2,
        "residual_pairs_1": 1,
        "residual_pairs_2": 0,
        "first_num_compared": 2,
        "first_sum_abs_log_ratio": 0.5,
        # (0.5 + 0) / 2; lag 1 leaves 0.5 and lag -1 leaves 1, which is more.
        "max_window_residual": 0.25,
        "max_window_lag_gain": 0.0,
    }
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, abs=5e-7)


def test_a_large_ratio_is_capped_clamped_and_clipped(device: torch.device, backend: str) -> None:
    found = row_of([-1.0], [-31.0], device=device)
    exact = {"torch": 1e-12}.get(backend, 1e-6)
    assert found["sum_log_ratio"] == found["max_abs_log_ratio"] == 30.0
    assert found["sum_sq_log_ratio"] == 900.0
    # Only the exponent is clamped to 20: e^20 - 1 - 30.
    assert found["sum_k3"] == pytest.approx(math.exp(20) - 31, rel=exact)
    assert found["sum_k3_capped"] == 1.0
    assert found["sum_ratio"] == pytest.approx(math.exp(20), rel=exact)
    assert found["sum_sq_ratio"] == pytest.approx(math.exp(40), rel=exact)
    assert found["residual_sum_0"] == RESIDUAL_CLIP


# Below 1/4, below 1, up to 8, beyond, and where the exponent is clamped.
@pytest.mark.parametrize(
    ("size", "relative"), [(0.2499, 1e-6), (0.9, 1e-6), (7.9, 1e-6), (19.9, 3e-6), (25.0, 3e-6)]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_equal_terms_stay_exact(
    size: float, relative: float, sign: int, device: torch.device
) -> None:
    # Equal terms round alike in every sum, the worst case.
    width = 3000
    inference = torch.full((1, width), -7.3 - 30 * (sign > 0), device=device)
    trainer, mask = inference + sign * size, torch.ones(1, width, dtype=torch.bool, device=device)
    segments = torch.tensor([(0, 0, width, 0)])
    found = alignment_stats(trainer, inference, mask, segments)[0].tolist()
    truth = by_loop(trainer.cpu(), inference.cpu(), mask.cpu(), segments)[0]
    for name, ours, exact in zip(STAT_COLUMNS, found, truth, strict=True):
        # 1 less a share of which both sides are rounded.
        size_of = 2.0 if name == "max_window_lag_gain" else abs(exact)
        assert abs(ours - exact) <= relative * size_of, name


def test_small_log_ratios_keep_their_k3(device: torch.device) -> None:
    # x^2 / 2 to a relative 4e-8, where exp(x) - 1 - x in float32 would be noise.
    found = row_of([-(2.0**-23)] * 4, [0.0] * 4, device=device)
    assert found["sum_k3"] == pytest.approx(4 * 2.0**-47, rel=1e-6)


def test_zeros_are_counted_only_where_the_trainer_says_they_cannot_be() -> None:
    # Sure of it itself; exactly at the limit; below it; not zero; below it but masked; minus zero.
    trainer = [-1e-5, -1e-3, -2e-3, -2e-3, -2e-3, -4.0]
    inference = [0.0, 0.0, 0.0, -1e-30, 0.0, -0.0]
    found = row_of(trainer, inference, [True, True, True, True, False, True])
    assert found["num_zeros"] == 2
    assert found["max_inference"] == 0.0


def test_confident_disagreements_need_half_the_mass_and_more_than_two_nats() -> None:
    half = math.log(0.5)
    # 2.5 lower at p = 0.5; 1.99 lower; 2.5 higher cannot be; p just under a half; p = 1.
    trainer = [half - 2.5, half - 1.99, -0.1, -0.70 - 3, -2.25]
    inference = [half, half, -2.6, -0.70, 0.0]
    assert row_of(trainer, inference)["num_confident_disagreements"] == 2


def test_tokens_that_are_not_finite_are_counted_by_side_and_leave_the_sums() -> None:
    trainer = [NAN, -1.0, -INF, -1.0, -1.0, NAN]
    inference = [-1.0, NAN, -1.0, INF, -2.0, NAN]
    found = row_of(trainer, inference, [True] * 5 + [False])
    assert (found["count"], found["num_compared"]) == (5, 1)
    assert (found["num_trainer_not_finite"], found["num_inference_not_finite"]) == (2, 2)
    assert found["sum_log_ratio"] == found["max_abs_log_ratio"] == 1.0
    assert found["max_inference"] == -2.0
    # At lag 1 finite values meet that do not at lag 0: inference[0] with trainer[1], and [2] with [3].
    assert (found["residual_pairs_0"], found["residual_pairs_1"]) == (1, 2)
    assert all(math.isfinite(value) for value in found.values())


def test_a_segment_that_compares_nothing_has_zeros_and_no_largest_logprob() -> None:
    for found in (row_of([], []), row_of([-1.0], [-2.0], [False])):
        assert found.pop("max_inference") == -INF
        assert set(found.values()) == {0.0}


# An engine's list that starts an entry late or early: entry t is that of token t + lag.
@pytest.mark.parametrize("lag", [-2, -1, 1, 2])
def test_a_shifted_list_fits_at_its_own_lag_only(device: torch.device, lag: int) -> None:
    trainer = [-0.1, -3.0, -0.7, -1.9, -0.2, -2.4, -1.1]
    inference = [trainer[t + lag] if 0 <= t + lag < 7 else -5.0 for t in range(7)]
    found = row_of(trainer, inference, device=device)
    assert found[f"residual_sum_{lag}"] == 0.0
    assert [found[f"residual_pairs_{k}"] for k in LAGS] == [5, 6, 7, 6, 5]
    assert all(found[f"residual_sum_{k}"] > 1.0 for k in LAGS if k != lag)


def test_an_entry_too_many_in_front_is_lag_minus_one() -> None:
    # Tokens a b c with trainer logprobs -1 -2 -3; the engine's list lost its head's partner: x, a, b.
    found = row_of([-1.0, -2.0, -3.0], [-9.0, -1.0, -2.0])
    assert (found["residual_sum_-1"], found["residual_pairs_-1"]) == (0.0, 2)
    # At lag 0: min(8, 4) + 1 + 1.
    assert (found["residual_sum_0"], found["residual_pairs_0"]) == (6.0, 3)


def test_a_stretch_at_another_lag_shows_in_its_window_alone(device: torch.device) -> None:
    # 200 tokens that agree but for 0.01 nats, of which the window from 128 on has the values of lag 1.
    trainer = [-((7 * t % 10) + 1) / 10 for t in range(200)]
    inference = [value + 0.01 for value in trainer]
    inference[128:191] = trainer[129:192]
    found = row_of(trainer, inference, device=device)
    # Neighbours differ by 0.7 or 0.3: at t = 128, 138, ... 7 of 10 by 0.3 and 3 by 0.7. Token 191 by 0.01.
    apart = [abs(trainer[t] - trainer[t + 1]) for t in range(128, 191)]
    assert found["max_window_residual"] == pytest.approx((sum(apart) + 0.01) / 64, rel=1e-5)
    assert found["max_window_lag_gain"] == pytest.approx(1.0, abs=1e-5)
    # All 199 pairs together leave more at lag 1 than at lag 0.
    assert found["residual_sum_1"] > found["residual_sum_0"]
    assert (found["first_num_compared"], found["first_sum_abs_log_ratio"]) == (
        64,
        pytest.approx(0.64, rel=1e-5),
    )


def test_a_window_that_is_not_loud_counts_as_0(device: torch.device) -> None:
    quiet, loud = [0.019] * 64, [0.021] * 64
    assert row_of([-1.0] * 64, [-1.0 - x for x in quiet], device=device)["max_window_residual"] == 0.0
    found = row_of([-1.0] * 128, [-1.0 - x for x in quiet + loud], device=device)
    assert found["max_window_residual"] == pytest.approx(0.021, rel=1e-5)
    # A constant fits at every lag as well as at lag 0.
    assert found["max_window_lag_gain"] == pytest.approx(0.0, abs=1e-5)


def test_the_last_tokens_of_a_segment_are_a_window_of_their_own(device: torch.device) -> None:
    # One wild token after whole windows: a window of one, which has no pair at another lag.
    found = row_of([-1.0] * 129, [*[-1.0] * 128, -3.0], device=device)
    assert (found["max_window_residual"], found["max_window_lag_gain"]) == (2.0, 0.0)
    # In a whole window it is one of 64.
    assert row_of([-1.0] * 128, [*[-1.0] * 127, -3.0], device=device)["max_window_residual"] == 2 / 64


def test_a_pair_needs_both_ends_trained_and_in_one_segment(device: torch.device) -> None:
    ones = torch.ones(1, 6, device=device)
    mask = torch.tensor([[True, True, False, True, True, True]], device=device)
    segments = torch.tensor([[0, 0, 4, 0], [0, 4, 6, 1]], dtype=torch.int32, device=device)
    table = alignment_stats(-ones, -ones, mask, segments)
    # Segment 0 has tokens 0 1 (2) 3, the third untrained: neighbours 0-1, two apart 1-3. Segment 1: 4-5.
    assert column(table, "residual_pairs_1").tolist() == [1, 1]
    assert column(table, "residual_pairs_-1").tolist() == [1, 1]
    assert column(table, "residual_pairs_2").tolist() == [1, 0]
    assert column(table, "residual_pairs_0").tolist() == [3, 2]


# 260: segments of several windows.
@pytest.mark.parametrize(("seed", "width"), [(0, 60), (1, 60), (2, 60), (3, 260), (4, 260)])
def test_equals_a_loop_over_tokens(device: torch.device, seed: int, width: int, backend: str) -> None:
    batch = random_batch(seed, width=width)
    found = alignment_stats(*(tensor.to(device) for tensor in batch)).cpu()
    expected = torch.tensor(by_loop(*batch), dtype=torch.float64)
    sizes = expected.abs()
    # Terms of both signs: the error is of their sizes.
    sizes[:, STAT_COLUMNS.index("sum_log_ratio")] = sizes[:, STAT_COLUMNS.index("sum_abs_log_ratio")]
    error = torch.where(found == expected, 0.0, (found - expected).abs())
    # Of 1 less a share of the residual at lag 0, to which that of the share adds up.
    sizes[:, STAT_COLUMNS.index("max_window_lag_gain")] = 2.0
    assert (error <= RELATIVE[backend] * sizes + 1e-12).all()


def test_blocks_of_segments_change_no_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = tuple(tensor.to(device) for tensor in random_batch(3))
    whole = alignment_stats(*batch)
    # 1: every segment is longer than a block, and is taken all the same.
    for tokens in (1, 20, 50):
        monkeypatch.setattr(stats, "TOKENS_AT_ONCE", tokens)
        assert torch.equal(alignment_stats(*batch), whole)


@pytest.mark.parametrize("seed", range(3))
def test_a_segment_alone_has_the_same_bits_as_in_its_batch(device: torch.device, seed: int) -> None:
    # 3000: long enough for vectorised or split sums, did they depend on the surroundings.
    trainer, inference, mask, segments = (
        tensor.to(device) for tensor in random_batch(seed, rows=3, width=3000)
    )
    table = alignment_stats(trainer, inference, mask, segments)
    for index, (row, start, stop, turn) in enumerate(segments.tolist()):
        piece = (slice(row, row + 1), slice(start, stop))
        alone = torch.tensor([[0, 0, stop - start, turn]], dtype=torch.int32, device=device)
        lonely = alignment_stats(trainer[piece], inference[piece], mask[piece], alone)
        assert torch.equal(lonely[0], table[index])


def test_two_runs_have_the_same_bits(device: torch.device) -> None:
    batch = tuple(tensor.to(device) for tensor in random_batch(7, rows=8, width=2000))
    assert torch.equal(alignment_stats(*batch), alignment_stats(*batch))


@given(seed=st.integers(0, 2**31), order=st.randoms())
def test_reordered_segments_reorder_rows(seed: int, order: random.Random) -> None:
    trainer, inference, mask, segments = random_batch(seed)
    permutation = list(range(len(segments)))
    order.shuffle(permutation)
    table = alignment_stats(trainer, inference, mask, segments)
    assert torch.equal(alignment_stats(trainer, inference, mask, segments[permutation]), table[permutation])


@given(seed=st.integers(0, 2**31), garbage=st.floats(width=32))
def test_values_under_the_mask_change_no_bit(seed: int, garbage: float) -> None:
    trainer, inference, mask, segments = random_batch(seed)
    table = alignment_stats(trainer, inference, mask, segments)
    trainer[~mask], inference[~mask] = garbage, garbage
    assert torch.equal(alignment_stats(trainer, inference, mask, segments), table)


@given(seed=st.integers(0, 2**31), left=st.integers(0, 9), right=st.integers(0, 9))
def test_padding_on_either_side_changes_no_bit(seed: int, left: int, right: int) -> None:
    trainer, inference, mask, segments = random_batch(seed)
    table = alignment_stats(trainer, inference, mask, segments)
    padded = [
        torch.nn.functional.pad(tensor, (left, right), value=value)
        for tensor, value in ((trainer, NAN), (inference, NAN), (mask, True))
    ]
    moved = segments + torch.tensor([0, left, left, 0], dtype=torch.int32)
    assert torch.equal(alignment_stats(*padded, moved), table)


def test_overlapping_segments_are_each_counted_whole() -> None:
    trainer, inference, mask, _ = random_batch(1)
    pair = torch.tensor([[0, 0, 40, 0], [0, 20, 60, 1]], dtype=torch.int32)
    table = alignment_stats(trainer, inference, mask, pair)
    for index in range(2):
        assert torch.equal(
            alignment_stats(trainer, inference, mask, pair[index : index + 1])[0], table[index]
        )


def test_no_segments_or_no_tokens_give_an_empty_table(device: torch.device) -> None:
    none = torch.zeros(0, 4, dtype=torch.int32, device=device)
    for shape in ((2, 0), (0, 3), (2, 3)):
        zeros = torch.zeros(shape, device=device)
        table = alignment_stats(zeros, zeros, zeros.bool(), none)
        assert table.shape == (0, len(STAT_COLUMNS))
        assert table.dtype == torch.float64


def test_the_table_carries_no_gradient() -> None:
    trainer = torch.full((1, 3), -1.0, requires_grad=True)
    segments = torch.tensor([[0, 0, 3, 0]], dtype=torch.int32)
    table = alignment_stats(trainer, trainer.detach() - 0.5, torch.ones(1, 3, dtype=torch.bool), segments)
    assert not table.requires_grad


@pytest.mark.parametrize("segment", [(2, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 2, 1), (0, 0, 4), (0, 4, 4)])
def test_a_segment_outside_the_batch_is_refused_by_its_index(segment: tuple[int, int, int]) -> None:
    zeros = torch.zeros(2, 3)
    segments = torch.tensor([(0, 0, 3, 0), (*segment, 5)], dtype=torch.int32)
    with pytest.raises(ShapeError) as raised:
        alignment_stats(zeros, zeros, zeros.bool(), segments)
    assert f"1: {(*segment, 5)}" in str(raised.value)
    assert "0 <= row < 2 and 0 <= start <= stop <= 3" in str(raised.value)


def test_column_takes_one_by_name_and_refuses_others() -> None:
    table = torch.arange(2 * len(STAT_COLUMNS)).reshape(2, -1)
    width = len(STAT_COLUMNS)
    assert column(table, "sum_k3").tolist() == [5, width + 5]
    assert column(table, "count").tolist() == [0, width]
    with pytest.raises(KeyError, match="no column 'k3'"):
        column(table, "k3")
    with pytest.raises(ShapeError, match=r"table: found shape \[2, 3\]"):
        column(table[:, :3], "count")


def test_the_ratio_comes_with_the_table(device: torch.device) -> None:
    trainer, inference, mask, _ = (tensor.to(device) for tensor in random_batch(2, rows=3, width=1500))
    segments = torch.tensor([[0, 0, 1500, 0], [1, 10, 900, 0]])
    found = alignment_stats_and_ratio(trainer, inference, mask, segments)
    assert torch.equal(found.table, alignment_stats(trainer, inference, mask, segments))
    compared = mask & trainer.isfinite() & inference.isfinite()
    compared[1, :10], compared[1, 900:], compared[2] = False, False, False
    log_ratio = torch.where(compared, trainer - inference, 0.0).double()
    torch.testing.assert_close(found.ratio.double(), log_ratio.clamp(-20, 20).exp(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_trained_positions_outside_of_all_segments_are_counted(seed: int) -> None:
    _, _, mask, segments = random_batch(seed)
    # In any order, some overlapping, some left out.
    segments = torch.cat([segments[::2], torch.tensor([[1, 0, 40, 0], [1, 20, 60, 1]])]).to(torch.int32)
    left = mask.clone()
    for row, start, stop, _ in segments.tolist():
        left[row, start:stop] = False
    assert count_outside(mask, segments) == stats.count_outside(mask, segments) == int(left.sum())
    assert count_outside(mask, segments[:0]) == int(mask.sum())
    assert count_outside(mask[:0], segments[:0]) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_torchs_threads_change_no_bit(threads: int) -> None:
    batch = random_batch(5, rows=6, width=40_000)
    before = torch.get_num_threads()
    table = alignment_stats(*batch)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(alignment_stats(*batch), table)
    finally:
        torch.set_num_threads(before)
