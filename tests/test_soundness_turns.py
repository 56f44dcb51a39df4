"""What turns show by themselves: counts, ends, stop strings, placeholders; real replies are silent."""

import json
from dataclasses import replace

import numpy as np
import pytest
from builders import provenance, trajectory, turn
from transformers import AutoTokenizer

from rlbatch import check_sound, parse_response, to_samples
from rlbatch.errors import RecordError, ReplyError, SoundnessError
from rlbatch.faults import TURN_FAULTS
from rlbatch.records import SamplingParams, Usage
from rlbatch.soundness import check_sound_trajectory, require_sound_trajectory

HOW = provenance(eos_token_ids=(2, 4))


def told(made):
    return [(each.code, each.severity, each.where.start, each.where.stop) for each in _found(made)]


def _found(made):
    return check_sound_trajectory(trajectory(made))


def ended(ids, **changes):
    return turn([1, 5], ids, [-0.3] * len(ids), **{"provenance": HOW} | changes)


@pytest.fixture(scope="module")
def clean(data_dir):
    rows = json.loads((data_dir / "rollouts" / "fp32_raw__t1.json").read_text())["rows"]
    return [
        trajectory(
            turn(
                row["prompt_ids"],
                row["ids"],
                row["lp"],
                provenance=HOW,
                text=row["text"],
                finish_reason=row["finish_reason"],
                stop_reason=row["stop_reason"],
                usage=Usage(num_prompt_tokens=len(row["prompt_ids"]), num_completion_tokens=len(row["ids"])),
            ),
            trajectory_id=f"t{at}",
        )
        for at, row in enumerate(rows)
    ]


@pytest.fixture(scope="module")
def decode(tinylm_dir):
    return AutoTokenizer.from_pretrained(tinylm_dir).decode


def test_real_turns_are_sound(clean, decode):
    assert [found for made in clean for found in check_sound_trajectory(made, decode=decode)] == []
    assert require_sound_trajectory(clean[0]) is clean[0]


def test_every_recorded_reply_that_is_parsed_is_sound(data_dir):
    num_turns = 0
    for path in sorted((data_dir / "replies").glob("*/*.json")):
        recording = json.loads(path.read_text())
        sampling = SamplingParams(temperature=1.0)
        how = provenance(sampling=sampling, logprobs_mode="unknown", eos_token_ids=(2, 4))
        body = recording.get("response")
        if not isinstance(body, dict) or "choices" not in body:
            continue
        try:
            turns = parse_response(body, provenance=how)
        except ReplyError:
            continue
        num_turns += len(turns)
        assert [each for made in turns for each in check_sound_trajectory(trajectory(made))] == [], path.name
    assert num_turns > 20


def test_recorded_conversations_are_sound(data_dir, decode):
    recording = json.loads((data_dir / "replies" / "fp32_raw" / "chat_multi_turn_t0.json").read_text())
    for at, pair in enumerate(recording["turns"]):
        turns = []
        for part in ("turn1", "turn2"):
            sampling = SamplingParams(temperature=pair[part]["request"]["temperature"])
            how = provenance(
                sampling=sampling, logprobs_mode="raw", eos_token_ids=(2, 4), bos_token_id=1, vocab_size=1536
            )
            turns += parse_response(pair[part]["response"], request=pair[part]["request"], provenance=how)
        made = trajectory(*turns, trajectory_id=f"{at}")
        assert check_sound_trajectory(made, decode=decode) == ()
        (joined,) = to_samples(made)
        assert check_sound([joined], purpose="audit") == ()


@pytest.mark.parametrize("code", TURN_FAULTS)
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_a_planted_fault_is_named_and_nothing_else_is_said(clean, decode, code, share):
    for seed in range(3):
        planted = TURN_FAULTS[code].plant(clean, np.random.default_rng(seed), share=share)
        for new, old in zip(planted, clean, strict=True):
            # A text is held against ids only where ids were not lost: one cause, one code.
            known = decode if code in ("text-mismatch", "placeholder-count") else None
            codes = {found.code for found in check_sound_trajectory(new, decode=known)}
            assert codes == (set() if new is old else {code})


@pytest.mark.parametrize(
    ("num_places", "said", "code"),
    [
        # One picture of 64 places, expanded twice or not at all; or eight of 8, of which one is lacking.
        (128, 68, "placeholder-count"),
        (64, 132, "placeholder-count"),
        (56, 68, "placeholder-count"),
        # Four ids are no picture of one of 64 places, though 64 is a multiple of 4.
        (64, 64, "usage-mismatch"),
        (64, 72, "usage-mismatch"),
    ],
)
def test_what_is_a_good_part_of_the_placeholders_is_of_pictures(num_places, said, code):
    # Four ids beside the places, of which usage counts `said`.
    prompt = [1, 5, *[9] * num_places, 6, 8]
    made = turn(prompt, [7, 2], [-0.1, -0.2], usage=Usage(num_prompt_tokens=said))
    assert [found.code for found in check_sound_trajectory(trajectory(made))] == [code]


def test_usage_counts_more_than_the_lists_have():
    made = ended([7, 8, 2], finish_reason="stop", usage=Usage(num_completion_tokens=20))
    (found,) = _found(made)
    assert (found.code, found.where.start, found.where.stop) == ("usage-mismatch", 2, 5)
    assert (found.expected, found.found) == ("20 sampled ids, as many as usage counts", "3 ids: 17 missing")
    assert told(ended([7, 8, 2], usage=Usage(num_completion_tokens=3))) == []
    assert told(ended([7, 8, 2], usage=Usage(num_prompt_tokens=3))) == [("usage-mismatch", "error", 0, 2)]


@pytest.mark.parametrize(
    ("ids", "changes", "expected"),
    [
        ([7, 8], {"finish_reason": "stop"}, [("finish-mismatch", "error", 3, 4)]),
        ([], {"finish_reason": "stop"}, [("finish-mismatch", "error", 2, 2)]),
        ([7, 4], {"finish_reason": "stop"}, []),
        ([7, 8], {"finish_reason": "stop", "stop_reason": 4}, [("finish-mismatch", "error", 3, 4)]),
        ([7, 9], {"finish_reason": "stop", "stop_reason": 9}, []),
        ([7, 8], {"finish_reason": "stop", "stop_reason": "x"}, []),
        ([7, 8], {"finish_reason": "length"}, []),
        ([7, 8], {"finish_reason": "tool_calls"}, []),
        ([7, 8], {"finish_reason": None}, []),
        ([7, 2], {"finish_reason": "length"}, [("finish-mismatch", "warning", 3, 4)]),
        ([7, 2, 8, 2], {"finish_reason": "length"}, []),
        ([7, 8], {"finish_reason": "stop", "provenance": provenance()}, []),
    ],
)
def test_a_turn_ends_as_it_says(ids, changes, expected):
    assert told(ended(ids, **changes)) == expected


def test_an_engine_that_does_not_say_why_it_stopped_may_have_met_a_stop_string():
    how = replace(HOW, engine="fireworks")
    assert told(ended([7, 8], finish_reason="stop", provenance=how)) == [("finish-mismatch", "warning", 3, 4)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a b", []), ("a b.", []), ("a b. c", [("stop-overrun", "error", 2, 4)]), (None, []), ("", [])],
)
def test_text_ends_with_its_stop_string(text, expected):
    assert told(ended([7, 8], finish_reason="stop", stop_reason=".", text=text)) == expected


def test_a_text_is_made_of_what_its_ids_decode_to():
    words = {7: "one ", 8: "two ", 9: "three", 2: "<eos>"}

    def decode(ids):
        return "".join(words[token] for token in ids)

    def codes(text, ids=(7, 8, 9, 2)):
        made = trajectory(ended(list(ids), text=text))
        return [each.code for each in check_sound_trajectory(made, decode=decode)]

    assert codes("one two three") == []
    assert codes("two three") == []
    assert codes("") == codes(None) == []
    assert codes("two one three") == ["text-mismatch"]
    assert codes("one two three four") == ["text-mismatch"]
    assert codes("one two three", ids=(7, 9, 2)) == ["text-mismatch"]


def test_errors_are_raised_and_other_things_refused():
    with pytest.raises(SoundnessError, match=r"\[finish-mismatch\] trajectory 't0', turn 0, tokens 3:4"):
        require_sound_trajectory(trajectory(ended([7, 8], finish_reason="stop")))
    with pytest.raises(RecordError, match="expected Trajectory, found Turn"):
        check_sound_trajectory(ended([7, 8]))


def test_breaks_of_the_prefix_are_told_with_the_rest():
    second = turn([1, 9, 9], [8, 2], [-0.1, -0.2], provenance=HOW)
    found = check_sound_trajectory(trajectory(ended([7, 2], finish_reason="stop"), second))
    assert [(each.code, each.where.turn) for each in found] == [("turn-prefix-broken", 1)]
