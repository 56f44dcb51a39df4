"""The kind and the place of a break, on ids written by hand: TMPL-1, TMPL-2, their kin, and clean twins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbatch.prefix import ANCHOR, Break, find_break, num_common

# 1 begins a text, 3 a message, 4 ends one, 20 is a newline; 50 and 51 open and close thinking.
USER = [1, 3, 11, 20, 100, 101, 4, 20, 3, 12, 20]
ANSWER = [50, 60, 61, 62, 51, 70, 71, 4]
TOOL = [20, 3, 13, 20, 80, 81, 82, 4, 20, 3, 12, 20]
SECOND = [50, 63, 51, 72, 73, 74, 75, 76, 77, 78, 79, 4]


def broken(earlier: list[tuple[bool, list[int]]], prompt: list[int]) -> Break | None:
    """The break of a prompt with (sampled, ids) runs."""
    ids = [each for _, run in earlier for each in run]
    sampled = [drawn for drawn, run in earlier for _ in run]
    return find_break(np.array(ids, np.int32), np.array(sampled, bool), np.array(prompt, np.int32))


ONE = [(False, USER), (True, ANSWER)]
TWO = [*ONE, (False, TOOL), (True, SECOND)]
MORE = [20, 3, 11, 20, 102, 4, 20, 3, 12, 20]


def test_a_prompt_that_extends_the_turns_before_is_no_break():
    assert broken(ONE, USER + ANSWER + TOOL) is None
    assert broken(TWO, USER + ANSWER + TOOL + SECOND) is None


def test_thinking_left_out_is_found_from_its_opening_id_to_its_closing_one():
    found = broken(ONE, USER + ANSWER[5:] + MORE)
    # Eleven ids of the prompt, then five of thinking: 50 60 61 62 51.
    assert found == Break(kind="stripped thinking", start=11, stop=16, prompt_stop=11, resumes=True)


def test_thinking_of_any_length_is_found():
    thinking = [50, *range(1_000, 21_000), 51]
    earlier = [(False, USER), (True, [*thinking, 70, 71, 4])]
    found = broken(earlier, [*USER, 70, 71, 4, *MORE])
    assert (found.kind, found.start, found.stop) == ("stripped thinking", 11, 11 + 20_002)


def test_a_newline_lost_after_a_stop_token_is_the_templates_suffix():
    # The second turn's prompt had the newline 20 after the first completion's 4; the third's has none.
    found = broken(TWO, USER + ANSWER + TOOL[1:] + SECOND + MORE)
    assert found == Break(kind="template suffix", start=19, stop=20, prompt_stop=19, resumes=True)
    assert ANSWER[-1] == 4


def test_an_empty_think_block_put_in_before_an_answer_is_the_templates_too():
    plain = [(False, USER), (True, [70, 71, 4])]
    found = broken(plain, [*USER, 50, 20, 51, 20, 70, 71, 4, *MORE])
    assert found == Break(kind="template suffix", start=11, stop=11, prompt_stop=15, resumes=True)


@pytest.mark.parametrize(
    ("again", "stop", "prompt_stop"),
    [
        # 61 62 merged into one id; 60 split in two; three ids for two.
        ([50, 60, 90, 51, 70, 71, 4], 15, 14),
        ([50, 91, 92, 61, 62, 51, 70, 71, 4], 13, 14),
        ([50, 93, 94, 95, 62, 51, 70, 71, 4], 14, 15),
    ],
)
def test_other_ids_inside_a_completion_that_then_goes_on_are_re_tokenised(again, stop, prompt_stop):
    found = broken(ONE, USER + again + MORE)
    assert (found.kind, found.stop, found.prompt_stop) == ("re-tokenised", stop, prompt_stop)


def test_a_lost_stop_token_is_re_tokenised_at_its_place():
    found = broken(ONE, USER + ANSWER[:-1] + [2, *MORE])
    assert (found.kind, found.start, found.stop, found.resumes) == ("re-tokenised", 18, 19, False)


@pytest.mark.parametrize(
    "between",
    [
        [20, 3, 13, 20, 80, 85, 82, 4, 20, 3, 12, 20],
        [20, 3, 13, 20, 80, 82, 4, 20, 3, 12, 20],
        [20, 3, 13, 20, 80, 81, 86, 87, 82, 4, 20, 3, 12, 20],
    ],
)
def test_other_ids_between_turns_are_a_tool_boundary(between):
    found = broken(TWO, USER + ANSWER + between + SECOND + MORE)
    assert found.kind == "tool boundary"
    assert found.start in (24, 25, 26)


def test_a_merge_across_the_end_of_a_completion_is_a_tool_boundary():
    # The last sampled id and the newline after it became one id.
    found = broken(TWO, USER + ANSWER[:-1] + [96] + TOOL[1:] + SECOND + MORE)
    assert found == Break(kind="tool boundary", start=18, stop=20, prompt_stop=19, resumes=True)


def test_a_prompt_that_ends_within_the_history_is_shortened():
    found = broken(TWO, USER + ANSWER + TOOL)
    assert (found.kind, found.start, found.stop) == ("shortened", 31, 43)


def test_a_difference_before_the_first_completion_is_another_prompt():
    assert broken(ONE, [1, 3, 11, 20, 100, 199, 4, 20, 3, 12, 20, *ANSWER]).kind == "another prompt"


def test_a_completion_of_which_nothing_comes_again_is_rewritten():
    found = broken(TWO, USER + ANSWER + TOOL + list(range(300, 312)))
    assert (found.kind, found.start, found.stop, found.prompt_stop) == ("rewritten", 31, 43, 43)


def test_a_few_equal_ids_by_chance_are_not_taken_for_the_rest():
    # After the break seven ids agree and the eighth does not: fewer than an anchor.
    long = [(False, [1]), (True, list(range(500, 530)))]
    prompt = [1, 501, 502, 503, 504, 505, 506, 507, 999, *range(700, 720)]
    assert ANCHOR == 8
    assert broken(long, prompt).kind == "rewritten"
    assert broken(long, [*prompt[:8], 508, *prompt[8:]]).kind == "stripped thinking"


@given(
    earlier=st.lists(st.integers(0, 3), min_size=1, max_size=24),
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=24),
    first=st.integers(0, 23),
)
def test_a_break_is_where_the_ids_first_differ_and_what_resumes_is_equal(earlier, prompt, first):
    ids, asked = np.array(earlier, np.int32), np.array(prompt, np.int32)
    found = find_break(ids, np.arange(len(ids)) >= first, asked)
    common = next((at for at, (a, b) in enumerate(zip(earlier, prompt, strict=False)) if a != b), None)
    common = min(len(earlier), len(prompt)) if common is None else common
    assert num_common(ids, asked) == common
    if common == len(earlier):
        assert found is None
        return
    assert found.start == common
    assert common <= found.stop <= len(earlier)
    assert common <= found.prompt_stop <= len(prompt)
    if found.resumes:
        rest = earlier[found.stop : found.stop + ANCHOR]
        assert prompt[found.prompt_stop : found.prompt_stop + len(rest)] == rest
        assert rest
