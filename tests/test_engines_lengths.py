"""What a difference in length equals, by hand."""

import pytest

from rlbatch.engines.lengths import why_unequal

PROMPT = [1, 5, 6]


@pytest.mark.parametrize(
    ("prompt", "ids", "values", "said"),
    [
        (PROMPT, [7, 8], [-1.0, None, -1.0], "as many as there are nulls among them"),
        (PROMPT, [7, 8], [-1.0] * 3, "the ids lack the stop token (2 or 4) that ended the turn"),
        (PROMPT, [], [-1.0], "the ids lack the stop token (2 or 4) that ended the turn"),
        (PROMPT, [7, 2], [-1.0], "the stop token 2 at the end of the ids has no logprob"),
        (PROMPT, [7, 2], [-1.0] * 3, None),
        (PROMPT, [7, 8], [-1.0] * 5, None),
        ([1, *[9] * 6, 5], [7, 8, 2], [-1.0] * 9, "a multiple of the 6 placeholders in a row in the prompt"),
        ([1, *[9] * 6, 5], [7, 8, 2], [-1.0] * 8, None),
        ([1, 9, 9, 9, 5], [7, 8, 2], [-1.0] * 6, None),
    ],
)
def test_the_difference_is_named_where_a_count_fits(prompt, ids, values, said):
    assert why_unequal(prompt, ids, values, stop_ids=(2, 4), stopped=True) == said


def test_a_turn_that_did_not_stop_lacks_no_stop_token():
    assert why_unequal(PROMPT, [7, 8], [-1.0] * 3, stop_ids=(2,), stopped=False) is None
    assert why_unequal(PROMPT, [7, 8], [-1.0] * 3, stop_ids=(), stopped=True) is None
