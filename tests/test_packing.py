"""Plans partition the samples, keep their order, and never exceed the budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbatch.errors import RecordError
from rlbatch.packing import plan_batches, too_long


def test_worked_examples():
    assert plan_batches([3, 4, 2], layout="packed", max_tokens=8) == [[0, 1], [2]]
    assert plan_batches([3, 4, 2], layout="padded", max_tokens=8) == [[0, 1], [2]]
    # Packed 3 + 2 + 3 = 8; padded three rows of 3 are 9.
    assert plan_batches([3, 2, 3], layout="packed", max_tokens=8) == [[0, 1, 2]]
    assert plan_batches([3, 2, 3], layout="padded", max_tokens=8) == [[0, 1], [2]]
    assert plan_batches([], layout="packed", max_tokens=8) == []


def test_samples_of_different_kinds_never_share_a_bin():
    plan = plan_batches([1, 1, 1, 1], layout="packed", max_tokens=9, kinds=["raw", "raw", "processed", "raw"])
    assert plan == [[0, 1], [2], [3]]


def test_a_sample_above_the_budget_is_an_error_that_names_it():
    assert too_long([3, 9, 10], 8) == [1, 2]
    with pytest.raises(RecordError, match=r"sample 1 of 9 tokens \(2 such samples\)"):
        plan_batches([3, 9, 10], layout="packed", max_tokens=8)
    with pytest.raises(RecordError, match="at least 1"):
        plan_batches([3], layout="packed", max_tokens=0)


@given(st.lists(st.integers(1, 30), max_size=60), st.sampled_from(["padded", "packed"]), st.integers(30, 90))
def test_plans_partition_in_order_within_the_budget(lengths, layout, max_tokens):
    plan = plan_batches(lengths, layout=layout, max_tokens=max_tokens)
    assert [index for part in plan for index in part] == list(range(len(lengths)))
    for part in plan:
        sizes = [lengths[index] for index in part]
        assert (sum(sizes) if layout == "packed" else len(sizes) * max(sizes)) <= max_tokens
