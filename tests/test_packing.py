"""Plans partition the samples, never exceed the budget, fill it, and share the work out evenly."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbatch.errors import RecordError
from rlbatch.packing import Cost, Room, balance, imbalance, plan_batches, plan_ranks, too_long

PACKED_8 = Room(layout="packed", max_tokens=8)
PADDED_8 = Room(layout="padded", max_tokens=8)


def test_worked_examples():
    assert plan_batches([3, 4, 2], PACKED_8) == [[0, 1], [2]]
    assert plan_batches([3, 4, 2], PADDED_8) == [[0, 1], [2]]
    # Packed 3 + 2 + 3 = 8; padded three rows of 3 are 9, and two of them go together.
    assert plan_batches([3, 2, 3], PACKED_8) == [[0, 1, 2]]
    assert plan_batches([3, 2, 3], PADDED_8) == [[0, 2], [1]]
    # The largest that fits beside 5 is 3, then 6 takes 2: in stored order it would be three batches.
    assert plan_batches([5, 2, 3, 6], PACKED_8) == [[0, 2], [1, 3]]
    assert plan_batches([], PACKED_8) == []


def test_samples_of_different_kinds_never_share_a_batch():
    plan = plan_batches([1, 1, 1, 1], PACKED_8, kinds=["raw", "raw", "processed", "raw"])
    assert plan == [[0, 1, 3], [2]]


def test_units_stay_whole_and_of_one_kind():
    # 0 and 3 take 6 together, so only the 2 fits beside them.
    assert plan_batches([3, 4, 2, 3], PACKED_8, units=[[0, 3], [1], [2]]) == [[0, 2, 3], [1]]
    # Padded, 0 and 3 are two rows of 3: no room beside the row of 4, nor for a third of 3.
    assert plan_batches([3, 4, 2, 3], PADDED_8, units=[[0, 3], [1], [2]]) == [[0, 3], [1], [2]]
    with pytest.raises(RecordError, match="the 2 samples kept with sample 0 of 10 tokens"):
        plan_batches([5, 5], PACKED_8, units=[[0, 1]])
    with pytest.raises(RecordError, match="samples of one kind in each, found 2 in unit 0"):
        plan_batches([1, 1], PACKED_8, units=[[0, 1]], kinds=["raw", "processed"])


def test_padding_counts_against_the_budget():
    zigzag = Room(layout="packed", max_tokens=16, sequence_multiple=4)
    # 5 -> 8 and 3 -> 4 make 12; another 8 does not fit.
    assert zigzag.tokens([5, 3]) == 12
    assert plan_batches([5, 3, 5], zigzag) == [[0, 2], [1]]
    rows = Room(layout="packed", max_tokens=10, row_multiple=8)
    assert rows.tokens([3, 3]) == 8
    # A batch of 9 would be padded to 16: only 8 can be used.
    assert plan_batches([4, 4, 1], rows) == [[0, 1], [2]]
    padded = Room(layout="padded", max_tokens=16, row_multiple=8)
    assert padded.tokens([5, 3]) == 16
    assert plan_batches([5, 3, 1], padded) == [[0, 1], [2]]


def test_a_sample_above_the_budget_is_an_error_that_names_it():
    assert too_long([3, 9, 10], PACKED_8) == [1, 2]
    # 8 tokens fit, and 7 padded to a multiple of 5 do not.
    assert too_long([5, 7], Room(layout="packed", max_tokens=8, sequence_multiple=5)) == [1]
    assert too_long([8, 9], Room(layout="padded", max_tokens=15, row_multiple=8)) == [1]
    with pytest.raises(RecordError, match=r"sample 1 of 9 tokens \(2 such\)"):
        plan_batches([3, 9, 10], PACKED_8)


@pytest.mark.parametrize("change", [{"max_tokens": 0}, {"sequence_multiple": 0}, {"row_multiple": -1}])
def test_a_room_without_room_is_refused(change):
    with pytest.raises(RecordError, match=f"{next(iter(change))}: expected at least 1"):
        Room(**{"layout": "packed", "max_tokens": 8} | change)


def test_an_unknown_layout_is_refused():
    with pytest.raises(RecordError, match="layout: expected one of padded, packed"):
        Room(layout="jagged", max_tokens=8)


rooms = st.builds(
    Room,
    layout=st.sampled_from(["padded", "packed"]),
    max_tokens=st.integers(40, 90),
    sequence_multiple=st.integers(1, 8),
    row_multiple=st.integers(1, 8),
)


def rounded(value, multiple):
    while value % multiple:
        value += 1
    return value


def used(lengths, room):
    """Tokens of a batch, counted here one by one."""
    sizes = [rounded(length, room.sequence_multiple) for length in lengths]
    if room.layout == "packed":
        return rounded(sum(sizes), room.row_multiple)
    return len(sizes) * rounded(max(sizes), room.row_multiple)


@given(st.lists(st.integers(1, 24), max_size=60), rooms, st.booleans())
def test_plans_partition_the_samples_within_the_budget(lengths, room, with_kinds):
    kinds = [length % 3 for length in lengths] if with_kinds else None
    plan = plan_batches(lengths, room, kinds=kinds)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    for batch in plan:
        assert used([lengths[index] for index in batch], room) <= room.max_tokens
        assert kinds is None or len({kinds[index] for index in batch}) == 1


@given(
    st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=4), max_size=20),
    rooms,
    st.integers(1, 9),
    st.floats(0, 1),
)
def test_ranks_partition_the_samples_into_as_many_batches_each(groups, room, num_ranks, quadratic):
    lengths = [length for group in groups for length in group]
    ends = np.cumsum([0, *map(len, groups)]).tolist()
    units = [list(range(start, stop)) for start, stop in pairwise(ends)]
    whole = [unit for unit in units if used([lengths[i] for i in unit], room) <= room.max_tokens]
    if len(whole) != len(units):
        return
    plan = plan_ranks(lengths, room, num_ranks=num_ranks, cost=Cost(quadratic=quadratic), units=units)
    assert len(plan) == num_ranks
    assert len({len(batches) for batches in plan}) == 1
    assert sorted(i for batches in plan for batch in batches for i in batch) == list(range(len(lengths)))
    for batches in plan:
        for batch in filter(None, batches):
            assert used([lengths[i] for i in batch], room) <= room.max_tokens
            assert all(set(unit) <= set(batch) or not set(unit) & set(batch) for unit in units)


def test_shares_are_worked_by_hand():
    assert balance([5, 4, 3, 3], 2) == [[0, 3], [1, 2]]
    assert balance([], 3) == [[], [], []]
    assert imbalance([5, 4, 3, 3], [[0, 3], [1, 2]]) == pytest.approx(8 / 7.5 - 1)
    with pytest.raises(RecordError, match="num_ranks: expected at least 1"):
        balance([1], 0)


def test_fewer_samples_than_ranks_leave_fillers():
    plan = plan_ranks([3, 8], PACKED_8, num_ranks=4, cost=Cost())
    assert plan == [[[1]], [[0]], [[]], [[]]]


def test_the_dearest_batch_of_every_rank_comes_first():
    lengths = [8, 8, 4, 4, 2, 2]
    plan = plan_ranks(lengths, PACKED_8, num_ranks=2, cost=Cost())
    assert [[sum(lengths[i] for i in batch) for batch in batches] for batches in plan] == [[8, 6], [8, 6]]


def test_long_sequences_weigh_more_where_attention_counts():
    # Linear: 4 + 4 against 8. Quadratic: 8 costs 64, and all four others 64 together.
    assert Cost(linear=1, quadratic=2).of([3]).tolist() == [21]
    shares = balance(Cost(linear=0, quadratic=1).of([8, 4, 4, 4, 4]), 2)
    assert shares == [[0], [1, 2, 3, 4]]
    with pytest.raises(RecordError, match="expected factors >= 0"):
        Cost(linear=-1)
    with pytest.raises(RecordError, match="one of them above"):
        Cost(linear=0)


def test_a_hundred_thousand_lengths_fill_their_batches_and_balance_over_ranks():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(7.1, 1.0, 100_000), 1, 16_384).astype(int).tolist()
    room = Room(layout="packed", max_tokens=16_384)
    plan = plan_batches(lengths, room)
    assert sum(lengths) / (len(plan) * room.max_tokens) >= 0.995
    assert imbalance(lengths, balance(lengths, 8)) < 1e-5
