"""Whatever samples hold, the checks answer with findings: nothing from inside numpy gets out."""

import operator
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from builders import provenance, sample
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rlbatch.catalogue import CATALOGUE
from rlbatch.errors import RecordError, SoundnessError
from rlbatch.records import Sample, SamplingParams
from rlbatch.soundness import check_sound, gate, require_sound

HOWS = (
    provenance(vocab_size=50, bos_token_id=1, eos_token_ids=(2,)),
    provenance(logprobs_mode="raw", sampling=SamplingParams(temperature=0.5)),
    provenance(sampling=SamplingParams(temperature=0.0), eos_token_ids=(2, 4)),
)


def codes(samples, **changes):
    return [found.code for found in check_sound(samples, **{"purpose": "train"} | changes)]


def one(**changes):
    return replace(sample([1, 5], [7, 2], [-0.25, -0.5]), **changes)


def test_rows_of_one_token_and_rows_that_nobody_sampled():
    context = replace(
        sample([9], [], []), sample_id="context", loss_mask=np.zeros(1, bool), trajectory_id="context"
    )
    assert len(context) == 1
    assert codes([context]) == ["nothing-trained"]
    assert codes([context, one(), context], group_size=None) == ["duplicate-sample"]
    assert codes([one(), context]) == []


def test_rows_that_are_masked_throughout():
    masked = one(loss_mask=np.zeros(4, bool))
    assert codes([masked]) == ["nothing-trained"]
    assert codes([masked, one(sample_id="another")]) == []


@pytest.mark.parametrize("value", [-0.5, 0.0, -0.0, -1e-30, -100.0])
def test_constant_logprobs_of_any_plausible_size(value):
    constant = sample([1, 5], [7] * 40, [value] * 40)
    assert codes([constant]) == []


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (np.nan, "logprob-missing"),
        (np.inf, "logprob-not-finite"),
        (-np.inf, "logprob-not-finite"),
        (-9999.0, "logprob-sentinel"),
        (-3e38, "logprob-sentinel"),
        (1.0, "logprob-positive"),
        (3e38, "logprob-positive"),
    ],
)
def test_impossible_values_everywhere_in_one_row_of_many(value, code):
    rows = [sample([1, 5], [7, 8, 9], [-0.5, -0.1, -0.3], trajectory_id=f"{at}") for at in range(5)]
    bad = sample([1, 5], [7, 8, 9], [value] * 3, trajectory_id="bad")
    found = check_sound([*rows, bad], purpose="train")
    assert [(each.code, each.where.sample) for each in found] == [(code, 5)]
    assert (found[0].where.start, found[0].where.stop) == (2, 5)


def test_no_samples():
    assert check_sound([], purpose="train", trainer_version=3, max_version_lag=1, group_size=8) == ()
    assert require_sound([]) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("inference_logprobs", np.zeros(4)),
        ("inference_logprobs", [0.0] * 4),
        ("loss_mask", np.ones(4, np.int64)),
        ("turn", np.zeros(4, np.int64)),
        ("policy_version", np.zeros(3, np.int32)),
        ("temperature", np.ones((2, 2), np.float32)),
    ],
)
def test_other_types_and_lengths_are_refused_where_the_record_is_made(field, value):
    with pytest.raises(RecordError, match=f"Sample.{field}"):
        one(**{field: value})


class Lazy(Sequence):
    """A sequence that gives one sample at a time, and no slices."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[operator.index(index)]


def test_any_sequence_of_samples_will_do():
    lazy = Lazy([one(), one(sample_id="another", inference_logprobs=np.full(4, np.nan, np.float32))])
    assert codes(lazy) == ["logprob-missing"]
    whole = Lazy([one()])
    assert require_sound(whole) is whole


def test_an_error_names_as_many_findings_as_are_read_and_holds_all():
    bad = [sample([1], [7], [np.nan], trajectory_id=f"{at}") for at in range(30)]
    with pytest.raises(SoundnessError) as caught:
        require_sound(bad)
    assert len(caught.value.findings) == 30
    assert "and 22 more of 30 findings" in str(caught.value)


@st.composite
def anything(draw):
    """A sample of structure only: every value is any that its dtype has."""
    num_tokens = draw(st.integers(1, 24))

    def column(dtype, **elements):
        return draw(arrays.arrays(dtype, num_tokens, elements=elements or None))

    turn = draw(arrays.arrays(np.int16, num_tokens, elements=st.integers(-1, len(HOWS) - 1)))
    turn[0] = -1
    floats = arrays.arrays(np.uint32, num_tokens)
    return Sample(
        token_ids=draw(arrays.arrays(np.int32, num_tokens, elements=st.integers(0, 2**31 - 1))),
        inference_logprobs=draw(floats).view(np.float32),
        raw_inference_logprobs=draw(st.none() | floats.map(lambda bits: bits.view(np.float32))),
        loss_mask=column(np.bool_),
        advantages=draw(floats).view(np.float32),
        policy_version=column(np.int32),
        temperature=draw(floats).view(np.float32),
        turn=turn,
        routed_experts=draw(
            st.none() | arrays.arrays(np.uint8, (num_tokens - 1, 2, 2), elements=st.integers(0, 3))
        ),
        sample_id=draw(st.sampled_from("abc")),
        trajectory_id=draw(st.sampled_from("xy")),
        group_id=draw(st.sampled_from(["g", None])),
        provenances=HOWS,
        finish_reasons=draw(st.sampled_from([(), ("stop", None, "length")])),
    )


@settings(max_examples=60)
@given(
    samples=st.lists(anything(), max_size=4),
    purpose=st.sampled_from(["train", "audit"]),
    told=st.sampled_from(
        [{}, {"trainer_version": 3, "max_version_lag": 1, "group_size": 2, "vocab_size": 9}]
    ),
)
def test_any_values_at_all_give_findings_of_the_catalogue(samples, purpose, told):
    found = check_sound(samples, purpose=purpose, **told)
    assert {each.code for each in found} <= set(CATALOGUE)
    lengths = [len(each) for each in samples]
    for each in found:
        assert (each.where.sample is None) == (each.code == "nothing-trained")
        if each.where.start is not None:
            assert 0 <= each.where.start < each.where.stop <= lengths[each.where.sample]
    # Samples are looked at in parts, and how they are parted changes nothing.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "PART_TOKENS", 1)
        assert check_sound(samples, purpose=purpose, **told) == found
