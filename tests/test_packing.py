"""Plans partition the samples, never exceed the budget, fill it, and share the work out evenly."""

import math
from itertools import pairwise

import numpy as np
import pytest
from builders import sample
from hypothesis import given
from hypothesis import strategies as st

from rlbatch.collate import Padding, collate
from rlbatch.collate.place import Place
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


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_row_is_a_multiple_of_both(layout):
    # 4 tokens make a sequence of 4, and the row of 4s and of 6s that holds it has 12.
    room = Room(layout=layout, max_tokens=20, sequence_multiple=4, row_multiple=6)
    assert room.tokens([4]) == 12
    padding = Padding(sequence_multiple=4, row_multiple=6)
    assert collate([sample([1, 5], [7, 2], [-1, -2])], layout=layout, padding=padding).shape == (1, 12)
    # A second row, or a pack of 24, is above 20; a pack of 12 holds three sequences.
    assert (
        plan_batches([4, 4, 4, 4], room)
        == {
            "packed": [[0, 1, 2], [3]],
            "padded": [[0], [1], [2], [3]],
        }[layout]
    )
    # 18 is a multiple of 6 below 20, and 16 one of 4: neither row can be made.
    assert too_long([12, 13, 16, 18], room) == [1, 2, 3]
    with pytest.raises(RecordError, match="sample 0 of"):
        plan_batches([13], room)


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
    # From the least common multiple of 7 and 8, which is the longest row that 24 tokens can become.
    max_tokens=st.integers(56, 120),
    sequence_multiple=st.integers(1, 8),
    row_multiple=st.integers(1, 8),
)


def used(lengths, room):
    """Tokens of the batch that `collate` makes of these lengths."""
    padding = Padding(sequence_multiple=room.sequence_multiple, row_multiple=room.row_multiple)
    return math.prod(Place.of(lengths, room.layout, padding).shape)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": [[0]]}, r"every sample in one unit, found sample 1 in 0 \(2 such\)"),
        ({"units": [[0], [1, 2], [0]]}, "found sample 0 in 2"),
        ({"units": [[0], [], [1, 2]]}, "units: expected samples in each, found none in unit 1"),
        ({"units": [[0, 1], [2, -3]]}, "indices of 3 samples, found -3"),
        ({"units": [[0, 1], [2, 3]]}, "indices of 3 samples, found 3"),
        ({"units": [[0, 1], [1.5]]}, "units: expected integers, found float64"),
        ({"units": []}, r"found sample 0 in 0 \(3 such\)"),
        ({"kinds": ["raw", "raw"]}, "kinds: expected one for each of 3 samples, found 2"),
        ({"lengths": [3, 0, 2]}, "lengths: expected at least 1, found 0 for sample 1"),
        ({"lengths": [3, 1.5, 2]}, "lengths: expected integers"),
    ],
)
def test_a_plan_of_what_says_two_things_is_refused(change, message):
    given = {"lengths": [3, 4, 2], "units": None, "kinds": None} | change
    for room in (PACKED_8, PADDED_8):
        with pytest.raises(RecordError, match=message):
            plan_batches(given["lengths"], room, kinds=given["kinds"], units=given["units"])
        with pytest.raises(RecordError, match=message):
            plan_ranks(
                given["lengths"],
                room,
                num_ranks=2,
                cost=Cost(),
                kinds=given["kinds"],
                units=given["units"],
            )


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (5, "lengths: expected a sequence, found int"),
        (None, "lengths: expected a sequence, found NoneType"),
        ((length for length in [3, 4]), "lengths: expected a sequence, found generator"),
        ("34", "lengths: expected a sequence, found str"),
        ([[3], [4, 5]], "lengths: expected integers, found what is none"),
        ([True, False], "lengths: expected integers, found bool"),
    ],
)
def test_lengths_that_are_no_sequence_of_integers_are_refused(lengths, message):
    with pytest.raises(RecordError, match=message):
        plan_batches(lengths, PACKED_8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kinds": [[1], [2]]}, "kinds: expected what has a hash"),
        ({"kinds": 3}, "kinds: expected a sequence, found int"),
        ({"units": [0, 1]}, "units: expected sequences of indices"),
        ({"units": 3}, "units: expected a sequence, found int"),
    ],
)
def test_kinds_and_units_of_another_sort_are_refused(given, message):
    with pytest.raises(RecordError, match=message):
        plan_batches([3, 4], PACKED_8, **given)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([1, float("nan"), 3], "costs: expected finite numbers >= 0, found nan for item 1"),
        ([1, 2, float("inf")], "costs: expected finite numbers >= 0, found inf for item 2"),
        ([-1, 2], "costs: expected finite numbers >= 0, found -1.0 for item 0"),
        (["a"], "costs: expected numbers, found <U1"),
        (None, "costs: expected a sequence, found NoneType"),
    ],
)
def test_costs_are_finite_numbers_from_zero_on(costs, message):
    with pytest.raises(RecordError, match=message):
        balance(costs, 2)
    with pytest.raises(RecordError, match=message):
        imbalance(costs, [[0]])


def test_shares_are_of_a_whole_number_of_ranks():
    with pytest.raises(RecordError, match=r"num_ranks: expected int, found 2\.5"):
        balance([1, 2], 2.5)
    with pytest.raises(RecordError, match="shares: expected at least one, found none"):
        imbalance([], [])


@pytest.mark.parametrize("bad", [24.5, True, "24"])
def test_a_bound_that_is_no_integer_is_refused(bad):
    for name in ("max_tokens", "sequence_multiple", "row_multiple"):
        with pytest.raises(RecordError, match=f"{name}: expected int, found {bad!r}"):
            Room(**{"layout": "packed", "max_tokens": 24} | {name: bad})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_cost_that_is_not_finite_is_refused(bad):
    with pytest.raises(RecordError, match="expected finite factors"):
        Cost(linear=bad)
    with pytest.raises(RecordError, match="expected finite factors"):
        Cost(quadratic=bad)


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
    # Packed in the order of the samples, the batch of 5 would come before that of 8.
    assert plan_ranks([5, 4, 4], PACKED_8, num_ranks=1, cost=Cost()) == [[[1, 2], [0]]]


def test_long_sequences_weigh_more_where_attention_counts():
    # Linear: 4 + 4 against 8. Quadratic: 8 costs 64, and all four others 64 together.
    assert Cost(linear=1, quadratic=2).of([3]).tolist() == [21]
    shares = balance(Cost(linear=0, quadratic=1).of([8, 4, 4, 4, 4]), 2)
    assert shares == [[0], [1, 2, 3, 4]]
    with pytest.raises(RecordError, match="expected finite factors >= 0"):
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
