"""Each dialect by hand, there and back, and what it refuses to lose."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import provenance, sample, trajectory, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbatch.assemble import to_samples
from rlbatch.batch import Batch
from rlbatch.collate import Padding, collate, unpack
from rlbatch.dialects import DIALECTS, as_dict, from_dict
from rlbatch.errors import RecordError
from rlbatch.packing import StepInfo
from rlbatch.records import Sample, SamplingParams, VersionSpan, identical

NAN = float("nan")
NAMES = sorted(DIALECTS)


def two_turns() -> Sample:
    """Tokens 1 5 | 7 2 | 9 | 4: two turns with a tool's token between them."""
    first = turn([1, 5], [7, 2], [-0.25, -0.5])
    second = turn([1, 5, 7, 2, 9], [4], [-0.75])
    (made,) = to_samples(trajectory(first, second, trajectory_id="a", advantage=2.0))
    return made


def small(layout: str = "padded") -> Batch:
    return collate([two_turns(), sample([1], [8], [-1.5], trajectory_id="b", advantage=-1.0)], layout=layout)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_trl_by_hand(layout):
    form = as_dict(small(layout), "trl")
    assert {key: value.tolist() for key, value in form.items()} == {
        "prompt_ids": [[1, 5], [0, 1]],
        "prompt_mask": [[1, 1], [0, 1]],
        "completion_ids": [[7, 2, 9, 4], [8, 0, 0, 0]],
        "completion_mask": [[1, 1, 1, 1], [1, 0, 0, 0]],
        "tool_mask": [[1, 1, 0, 1], [1, 0, 0, 0]],
        "sampling_per_token_logps": [[-0.25, -0.5, 0, -0.75], [-1.5, 0, 0, 0]],
        "advantages": [2, -1],
        "num_items_in_batch": 4,
    }
    assert "tool_mask" not in as_dict(collate([sample([1], [8, 9], [-1, -2])], layout=layout), "trl")


def test_verl_by_hand():
    routed = np.arange(5 * 2 * 1, dtype=np.uint8).reshape(5, 2, 1)
    made = replace(two_turns(), routed_experts=routed)
    other = sample([1], [8], [-1.5], trajectory_id="b", advantage=-1.0)
    other = replace(other, routed_experts=np.array([[[7], [6]]], np.uint8))
    form = as_dict(collate([made, other], layout="packed"), "verl")
    experts = form.pop("routed_experts")
    assert {key: value.tolist() for key, value in form.items()} == {
        "prompts": [[1, 5], [0, 1]],
        "responses": [[7, 2, 9, 4], [8, 0, 0, 0]],
        "input_ids": [[1, 5, 7, 2, 9, 4], [0, 1, 8, 0, 0, 0]],
        "attention_mask": [[1] * 6, [0, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 1, 1]],
        "response_mask": [[1, 1, 0, 1], [1, 0, 0, 0]],
        "rollout_log_probs": [[-0.25, -0.5, 0, -0.75], [-1.5, 0, 0, 0]],
        "advantages": [[2, 2, 0, 2], [-1, 0, 0, 0]],
        "temperature": [1, 1],
    }
    # Row t is the pass over token t: five passes of six tokens, and one of two behind the prompt's padding.
    assert experts[:, :, 1, 0].tolist() == [[1, 3, 5, 7, 9, 0], [0, 6, 0, 0, 0, 0]]


def test_prime_rl_by_hand():
    made = replace(two_turns(), ref_logprobs=np.float32([NAN, NAN, -1, -2, NAN, -3]))
    hot = provenance(sampling=SamplingParams(temperature=0.5))
    other = sample([1], [8], [-1.5], trajectory_id="b", advantage=-1.0, provenance=hot)
    other = replace(other, ref_logprobs=np.float32([NAN, -4]))
    assert as_dict(collate([made, other], layout="packed"), "prime_rl") == {
        "input_ids": [1, 5, 7, 2, 9, 4, 1, 8],
        "loss_mask": [False, False, True, True, False, True, False, True],
        "position_ids": [0, 1, 2, 3, 4, 5, 0, 1],
        "sequence_lengths": [6, 2],
        "seq_lens": [6, 2],
        "env_names": ["rlbatch"] * 8,
        "advantages": [0, 0, 2, 2, 0, 2, 0, -1],
        "inference_logprobs": [0, 0, -0.25, -0.5, 0, -0.75, 0, -1.5],
        "ref_logprobs": [0, 0, -1, -2, 0, -3, 0, -4],
        "temperatures": [1, 1, 1, 1, 1, 1, 1, 0.5],
    }


def test_tinker_by_hand():
    first, second = as_dict(small(), "tinker")["data"]
    assert first["model_input"] == [1, 5, 7, 2, 9]
    assert {key: value.tolist() for key, value in first["loss_fn_inputs"].items()} == {
        "target_tokens": [5, 7, 2, 9, 4],
        "logprobs": [0, -0.25, -0.5, 0, -0.75],
        "advantages": [0, 2, 2, 0, 2],
        "mask": [0, 1, 1, 0, 1],
    }
    assert (second["model_input"], second["loss_fn_inputs"]["target_tokens"].tolist()) == ([1], [8])


def test_the_batch_has_the_same_door():
    assert small().as_dict("prime_rl") == as_dict(small(), "prime_rl")


@pytest.mark.parametrize(
    ("dialect", "change", "lost"),
    [
        ("trl", {"temperature": np.float32([1, 0.5])}, "temperature"),
        ("tinker", {"temperature": np.float32([1, 0.5])}, "temperature"),
        ("verl", {"policy_version": np.int32([-1, 3])}, "policy_version"),
        ("prime_rl", {"proximal_logprobs": np.float32([NAN, -1])}, "proximal_logprobs"),
        ("trl", {"routed_experts": np.zeros((1, 2, 1), np.uint8)}, "routed_experts"),
        ("tinker", {"ref_logprobs": np.float32([NAN, -1])}, "ref_logprobs"),
        ("verl", {"teacher_logprobs": np.float32([NAN, -1])}, "teacher_logprobs"),
    ],
)
def test_losing_what_is_trained_is_an_error_unless_named(dialect, change, lost):
    batch = collate([replace(sample([1], [8], [-1.5]), **change)], layout="packed")
    with pytest.raises(RecordError, match=rf"{lost} of sample 't0:0' would be lost.*drop=\('{lost}',\)"):
        as_dict(batch, dialect)
    assert "advantages" in str(as_dict(batch, dialect, drop=[lost]))


EXPERTS = np.ones((1, 2, 1), np.int32)
REFS = np.float32([NAN, -2])


@pytest.mark.parametrize(
    ("dialect", "field", "value"),
    [
        ("trl", "ref_logprobs", REFS),
        ("trl", "proximal_logprobs", REFS),
        ("verl", "ref_logprobs", REFS),
        ("verl", "proximal_logprobs", REFS),
        ("verl", "routed_experts", EXPERTS),
        ("prime_rl", "ref_logprobs", REFS),
        ("prime_rl", "routed_experts", EXPERTS),
    ],
)
def test_a_field_that_one_trained_sample_lacks_is_refused_and_not_filled(dialect, field, value):
    having = replace(sample([1], [8], [-1.5], trajectory_id="a"), **{field: value})
    lacking = sample([1], [9], [-1.5], trajectory_id="b")
    batch = collate([having, lacking], layout="packed")
    with pytest.raises(RecordError, match=rf"expected {field} of every .* 'a:0' and not in 'b:0' \(1 such\)"):
        as_dict(batch, dialect)
    dropped = as_dict(batch, dialect, drop=[field])
    assert field not in back_and_forth(dropped, dialect, batch)
    # A sample of which nothing is trained may lack it: no loss reads its filler.
    untrained = replace(lacking, loss_mask=np.zeros(2, bool))
    batch = collate([having, untrained], layout="packed")
    back = unpack(from_dict(as_dict(batch, dialect), dialect, like=batch))
    # The filler of the dict is no value of its own.
    assert [getattr(made, field) is None for made in back] == [False, True]


def back_and_forth(form, dialect: str, batch: Batch) -> set[str]:
    """Optional fields that the form itself carries: found in a batch that had none before."""
    bare = [
        replace(made, ref_logprobs=None, proximal_logprobs=None, routed_experts=None)
        for made in unpack(batch)
    ]
    back = from_dict(form, dialect, like=collate(bare, layout="packed"))
    names = ("ref_logprobs", "proximal_logprobs", "routed_experts")
    return {name for name in names if getattr(back, name) is not None}


@pytest.mark.parametrize("dialect", ["trl", "verl", "prime_rl", "tinker"])
def test_a_key_that_would_be_lost_on_the_way_back_is_refused_unless_it_is_dropped(dialect):
    batch = small()
    form = as_dict(batch, dialect, drop=_LOST.get(dialect, ()))
    form["entropys"] = torch.zeros(1)
    with pytest.raises(RecordError, match=r"found 'entropys', which would be lost.*drop=\('entropys',\)"):
        from_dict(form, dialect, like=batch)
    back = from_dict(form, dialect, like=batch, drop=["entropys"])
    assert torch.equal(back.input_ids, batch.input_ids)


_LOST = {"trl": ["temperature"], "tinker": ["temperature"]}


def test_one_name_in_place_of_several_is_refused_as_text():
    batch = small()
    with pytest.raises(RecordError, match=r"as_dict\('verl'\): drop: .* found the text 'policy_version'"):
        as_dict(batch, "verl", drop="policy_version")
    with pytest.raises(RecordError, match=r"from_dict\('verl'\): drop: .* found the text 'entropys'"):
        from_dict(as_dict(batch, "verl"), "verl", like=batch, drop="entropys")


@pytest.mark.parametrize("drop", [["advantage"], ["loss_mask"], ["token_ids"]])
def test_a_name_to_drop_that_is_no_field_is_refused(drop):
    with pytest.raises(RecordError, match=r"as_dict\('trl'\): drop: expected one of inference_logprobs"):
        as_dict(small(), "trl", drop=drop)


def in_a_step(batch: Batch, num_loss_tokens: int) -> Batch:
    step = StepInfo(
        epoch=0,
        step=3,
        index=0,
        num_batches=2,
        num_samples=4,
        num_trajectories=4,
        num_tokens=20,
        num_loss_tokens=num_loss_tokens,
    )
    return replace(batch, step=step)


def test_trl_divides_by_the_tokens_of_the_whole_step():
    # 3 + 1 trained tokens here, and 7 more in the step's other micro-batch.
    assert as_dict(in_a_step(small(), 11), "trl")["num_items_in_batch"].tolist() == 11
    assert as_dict(small(), "trl")["num_items_in_batch"].tolist() == 4


@pytest.mark.parametrize("dialect", NAMES)
def test_what_comes_back_is_in_its_step_with_its_padding(dialect):
    padding = Padding(side="left", token_id=77, row_multiple=8)
    like = in_a_step(collate([two_turns(), sample([1], [8], [-1.5])], layout="padded", padding=padding), 11)
    back = from_dict(as_dict(like, dialect), dialect, like=like)
    assert back.step == like.step
    assert back.input_ids.tolist() == [[77, 77, 1, 5, 7, 2, 9, 4], [77] * 6 + [1, 8]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@pytest.mark.parametrize("dialect", NAMES)
def test_what_comes_back_is_on_the_device_of_the_batch(dialect):
    like = small().to("cuda")
    assert from_dict(as_dict(like, dialect), dialect, like=like).input_ids.device.type == "cuda"


@pytest.mark.parametrize("dialect", ["verl", "prime_rl"])
def test_an_audit_gets_the_values_of_the_dict(dialect):
    raw = provenance(logprobs_mode="raw", sampling=SamplingParams(temperature=0.5))
    like = collate([sample([1, 5], [7, 2], [-1, -2], provenance=raw)], layout="padded", purpose="audit")
    form = as_dict(like, dialect, drop=["raw_inference_logprobs"])
    if dialect == "verl":
        form["rollout_log_probs"] = form["rollout_log_probs"] - 5
    else:
        form["inference_logprobs"] = [0, 0, -6, -7]
    back = from_dict(form, dialect, like=like)
    expected = torch.tensor([[NAN, -6, -7, NAN]])
    torch.testing.assert_close(back.inference_logprobs, expected, equal_nan=True)
    assert back.purpose == "audit"


@pytest.mark.parametrize(
    ("dialect", "change", "message"),
    [
        ("trl", {"sampling_per_token_logps": torch.zeros(2, 3)}, r"_logps of shape \[2, 4\], found \[2, 3\]"),
        ("trl", {"advantages": torch.tensor(1.0)}, r"advantages of shape \[2\], found \[\]"),
        ("trl", {"prompt_mask": torch.ones(2, 1)}, r"prompt_mask of shape \[2, 2\], found \[2, 1\]"),
        ("trl", {"completion_ids": torch.ones(4)}, r"completion_ids of shape \[2, any\], found \[4\]"),
        ("trl", {"completion_ids": [[1], [2]]}, r"completion_ids of shape \[2, any\], found list"),
        ("verl", {"advantages": torch.zeros(2)}, r"advantages of shape \[2, 4\], found \[2\]"),
        ("verl", {"rollout_log_probs": [0.0]}, "rollout_log_probs as a tensor, found list"),
        ("verl", {"attention_mask": torch.ones(2, 5)}, r"attention_mask of shape \[2, 6\], found \[2, 5\]"),
        ("verl", {"temperature": torch.tensor(1.0)}, r"temperature of shape \[2\], found \[\]"),
        ("prime_rl", {"advantages": [1.0]}, r"advantages of 8 numbers, found shape \[1\]"),
        ("prime_rl", {"advantages": 1.0}, r"advantages of 8 numbers, found shape \[\]"),
        ("prime_rl", {"advantages": [[1.0], 2.0]}, "advantages of 8 numbers, found what is none"),
    ],
)
def test_shapes_that_are_not_those_of_the_form_are_refused(dialect, change, message):
    with pytest.raises(RecordError, match=message):
        from_dict(as_dict(small(), dialect) | change, dialect, like=small())


def test_a_datum_of_another_length_is_refused():
    form = as_dict(small(), "tinker")
    form["data"][0]["loss_fn_inputs"]["logprobs"] = torch.zeros(4)
    with pytest.raises(RecordError, match=r"logprobs of shape \[5\], found \[4\]"):
        from_dict(form, "tinker", like=small())


def test_routed_experts_of_another_shape_are_refused():
    made = replace(sample([1], [8], [-1.5]), routed_experts=EXPERTS)
    batch = collate([made], layout="packed")
    form = as_dict(batch, "prime_rl")
    form["routed_experts"] |= {"shape": [2, 1, 2]}
    with pytest.raises(RecordError, match=r"routed_experts of shape \[2, 2, 1\], found \[2, 1, 2\] and 4"):
        from_dict(form, "prime_rl", like=batch)
    form = as_dict(batch, "verl")
    form["routed_experts"] = form["routed_experts"][:, :1]
    with pytest.raises(RecordError, match=r"routed_experts of shape \[1, 2, 2, 1\], found \[1, 1, 2, 1\]"):
        from_dict(form, "verl", like=batch)


def test_what_no_trained_token_says_may_go():
    spans = (VersionSpan(label="4", start=0, stop=1),)
    made = sample([1], [8], [-1.5], policy_versions=spans)
    untrained = replace(made, loss_mask=np.zeros(2, bool))
    assert as_dict(collate([untrained], layout="padded"), "trl")["tool_mask"].tolist() == [[0]]


@pytest.mark.parametrize(("dialect", "field"), [("trl", "advantages"), ("verl", "temperature")])
def test_one_value_a_row_where_the_trainer_has_room_for_one(dialect, field):
    values = np.float32([0, 0, 1, 2, 0, 1]) if field == "advantages" else np.float32([1, 1, 1, 0.5, 1, 1])
    batch = collate([replace(two_turns(), **{field: values})], layout="padded")
    with pytest.raises(RecordError, match=f"one value of {field} a row, found 2 in sample"):
        as_dict(batch, dialect)
    assert field not in as_dict(batch, dialect, drop=[field])
    as_dict(batch, "prime_rl")


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_trained_value_that_is_not_finite_is_refused(dialect, bad):
    made = replace(sample([1], [8, 9], [-1.5, -1]), inference_logprobs=np.float32([NAN, -1.5, bad]))
    with pytest.raises(RecordError, match=r"finite inference_logprobs at trained tokens.* at token 2"):
        as_dict(collate([made], layout="packed"), dialect)
    # Where it is not trained, the form's own filler stands.
    unmasked = replace(made, loss_mask=np.array([False, True, False]))
    as_dict(collate([unmasked], layout="packed"), dialect)


def test_an_unknown_dialect_and_a_foreign_dict_are_refused():
    with pytest.raises(RecordError, match="expected one of"):
        as_dict(small(), "verl2")
    with pytest.raises(RecordError, match="expected a key 'seq_lens'"):
        from_dict({}, "prime_rl", like=small())
    other = collate([sample([1], [8, 9], [-1.5, -1])], layout="padded")
    for dialect in NAMES:
        with pytest.raises(RecordError, match="from_dict: expected"):
            from_dict(as_dict(other, dialect), dialect, like=small())


def test_what_the_trainer_added_comes_back():
    form = as_dict(small("packed"), "verl")
    form["old_log_probs"] = torch.tensor([[-0.5, -0.25, 9.0, -0.125], [-2.0, 9, 9, 9]])
    back = from_dict(form, "verl", like=small("packed"))
    expected = [[NAN, -0.5, -0.25, NAN, -0.125, NAN, -2.0, NAN]]
    torch.testing.assert_close(back.proximal_logprobs, torch.tensor(expected), equal_nan=True)


def filtered(dialect: str, layout: str) -> tuple[Batch, dict]:
    """Token 3, the 2 of the first turn at -0.5, taken out of training, as the trainer sees it."""
    made = two_turns()
    mask = made.loss_mask.copy()
    mask[3] = False
    batch = collate([replace(made, loss_mask=mask)], layout=layout)
    return batch, as_dict(batch, dialect)


def train_token_3(form, dialect: str, value: float | None = None):
    """Mask it in again, and give it a logprob."""
    if dialect == "prime_rl":
        form["loss_mask"][3] = True
        values = form["inference_logprobs"]
        at = 3
    elif dialect == "tinker":
        inputs = form["data"][0]["loss_fn_inputs"]
        inputs["mask"][2] = 1
        values, at = inputs["logprobs"], 2
    else:
        form["response_mask" if dialect == "verl" else "tool_mask"][0, 1] = 1
        values = form["rollout_log_probs" if dialect == "verl" else "sampling_per_token_logps"][0]
        at = 1
    if dialect == "trl":
        form["num_items_in_batch"] += 1
    if value is not None:
        values[at] = value


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("dialect", NAMES)
def test_a_token_trained_again_keeps_its_own_values_and_gets_no_filler(dialect, layout):
    batch, form = filtered(dialect, layout)
    train_token_3(form, dialect)
    (back,) = unpack(from_dict(form, dialect, like=batch))
    assert back.loss_mask.tolist() == [False, False, True, True, False, True]
    assert (back.inference_logprobs[3], back.advantages[3]) == (-0.5, 2.0)
    train_token_3(form, dialect, value=-4.0)
    if dialect == "trl":
        form["num_items_in_batch"] -= 1
    (told,) = unpack(from_dict(form, dialect, like=batch))
    assert told.inference_logprobs[3] == -4.0


@pytest.mark.parametrize("dialect", NAMES)
def test_a_token_trained_anew_for_which_nobody_has_a_logprob_is_refused(dialect):
    made = two_turns()
    batch = collate([made], layout="packed")
    form = as_dict(batch, dialect)
    # Token 4 is the tool's.
    if dialect == "prime_rl":
        form["loss_mask"][4] = True
    elif dialect == "tinker":
        form["data"][0]["loss_fn_inputs"]["mask"][3] = 1
    else:
        form["response_mask" if dialect == "verl" else "tool_mask"][0, 2] = 1
    message = (
        "expected inference_logprobs of every token that is trained from now on.* token 4 of sample 'a:0'"
    )
    with pytest.raises(RecordError, match=message):
        from_dict(form, dialect, like=batch)


@pytest.mark.parametrize("dialect", ["trl", "verl"])
def test_a_trained_token_before_the_first_sampled_one_is_not_cut_off(dialect):
    made = two_turns()
    mask, values = made.loss_mask.copy(), made.inference_logprobs.copy()
    mask[1], values[1] = True, -1
    advantages = np.where(mask, np.float32(2), np.float32(0))
    batch = collate(
        [replace(made, loss_mask=mask, inference_logprobs=values, advantages=advantages)], layout="padded"
    )
    form = as_dict(batch, dialect)
    key = "tool_mask" if dialect == "trl" else "response_mask"
    assert form[key].tolist() == [[1, 1, 1, 0, 1]]
    (back,) = unpack(from_dict(form, dialect, like=batch))
    assert back.loss_mask.tolist() == mask.tolist()


def changed(dialect: str, key: str, change):
    """The form of `small` with one of its parts changed: `change` takes it and gives another."""
    form = as_dict(small(), dialect)
    part = form["data"][0] if dialect == "tinker" else form
    if key in part.get("loss_fn_inputs", ()):
        part = part["loss_fn_inputs"]
    part[key] = change(part[key])
    return form


def at(place, value):
    def change(values):
        values = values.clone() if isinstance(values, torch.Tensor) else list(values)
        values[place] = value
        return values

    return change


@pytest.mark.parametrize(
    ("dialect", "key", "change", "message"),
    [
        ("prime_rl", "input_ids", at(1, 5.7), "input_ids of integers, found float64"),
        ("prime_rl", "input_ids", at(1, 2**32 + 5), "token ids from 0 to 2.*31 - 1, found 4294967301"),
        ("prime_rl", "input_ids", at(1, -1), "token ids from 0 to 2.*31 - 1, found -1"),
        ("verl", "prompts", at((0, 1), 2**32 + 5), "expected input_ids as prompts and responses has it"),
        ("trl", "completion_ids", at((0, 1), 2**32 + 5), "token ids from 0 to .*, found 4294967301"),
        ("trl", "prompt_ids", lambda values: values.float(), "prompt_ids of integers, found float32"),
        ("tinker", "model_input", at(0, 2**40), "token ids from 0 to .*, found 1099511627776"),
        ("verl", "response_mask", lambda mask: mask * 0.5, "response_mask of bool or 0 and 1, found 0.5"),
        (
            "prime_rl",
            "loss_mask",
            lambda mask: ["False"] * len(mask),
            "loss_mask of bool or 0 and 1, found <U5",
        ),
        ("tinker", "mask", lambda mask: mask * 2, "mask of bool or 0 and 1, found 2.0"),
        (
            "verl",
            "rollout_log_probs",
            lambda values: values.double() * 1e300,
            r"inference_logprobs that float32 holds, found -2.5e\+299",
        ),
        (
            "verl",
            "input_ids",
            torch.zeros_like,
            "input_ids as prompts and responses has it, 1 at place 0, found 0",
        ),
        (
            "verl",
            "position_ids",
            torch.zeros_like,
            "position_ids as attention_mask has it, 1 at place 1, found 0",
        ),
        ("tinker", "model_input", at(2, 99), "model_input as target_tokens has it, 7 at place 1, found 99"),
        ("prime_rl", "position_ids", at(3, 0), "position_ids as seq_lens has it, 3 at place 3, found 0"),
        ("prime_rl", "sequence_lengths", at(0, 5), r"sequence_lengths of \[6, 2\], found \[5, 2\]"),
        ("trl", "num_items_in_batch", lambda _: torch.tensor(99), "num_items_in_batch of 4, as the mask"),
        ("tinker", "model_input", lambda _: None, r"model_input of 5 numbers, found shape \[\]"),
        ("prime_rl", "seq_lens", lambda _: None, "seq_lens as a list, found NoneType"),
        ("prime_rl", "advantages", lambda _: None, "advantages of 8 numbers, found shape"),
    ],
)
def test_nothing_is_cast_and_what_is_said_twice_agrees(dialect, key, change, message):
    with pytest.raises(RecordError, match=message):
        from_dict(changed(dialect, key, change), dialect, like=small())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.to("meta"), r"as a dense tensor, found one without values \(meta\)"),
        (torch.Tensor.to_sparse, "as a dense tensor, found sparse_coo"),
        (torch.Tensor.to_sparse_csr, "as a dense tensor, found sparse_csr"),
    ],
)
@pytest.mark.parametrize(
    ("dialect", "key"), [("trl", "completion_ids"), ("verl", "rollout_log_probs"), ("verl", "response_mask")]
)
# Torch calls its sparse layouts a beta.
@pytest.mark.filterwarnings("ignore:Sparse .* in beta state")
def test_tensors_without_a_value_for_every_place_are_refused(dialect, key, change, message):
    with pytest.raises(RecordError, match=f"{key} {message}"):
        from_dict(changed(dialect, key, change), dialect, like=small())


def test_what_has_no_keys_is_refused():
    with pytest.raises(RecordError, match="expected the form of trl as a dict, found NoneType"):
        from_dict(None, "trl", like=small())
    for data, message in ((None, "data as a list, found NoneType"), ([None, None], r"data\[0\] as a dict")):
        with pytest.raises(RecordError, match=message):
            from_dict({"data": data}, "tinker", like=small())


def test_of_a_step_a_count_covers_other_batches_too():
    like = in_a_step(small(), 11)
    form = as_dict(like, "trl")
    assert from_dict(form, "trl", like=like).step == like.step
    with pytest.raises(RecordError, match="num_items_in_batch of at least 4, as the mask has it, found 3"):
        from_dict(form | {"num_items_in_batch": torch.tensor(3)}, "trl", like=like)


def test_tensors_as_trainers_have_them_are_read():
    like = small()
    form = as_dict(like, "verl")
    form["rollout_log_probs"] = form["rollout_log_probs"].bfloat16().requires_grad_()
    form["response_mask"] = form["response_mask"].float()
    back = from_dict(form, "verl", like=like)
    # These logprobs are numbers that bfloat16 holds.
    torch.testing.assert_close(
        back.inference_logprobs, like.inference_logprobs, equal_nan=True, rtol=0, atol=0
    )


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    "padding",
    [
        Padding(row_multiple=64),
        Padding(side="left", token_id=3),
        Padding(sequence_multiple=4),
        Padding(sequence_multiple=4, row_multiple=6, token_id=5),
    ],
)
def test_what_comes_back_lies_where_it_lay(dialect, layout, padding):
    parts = [two_turns(), sample([1], [8], [-1.5]), sample([1, 3], [8, 4], [-1.5, -1.0], trajectory_id="c")]
    like = collate(parts, layout=layout, padding=padding)
    back = from_dict(as_dict(like, dialect), dialect, like=like)
    for name in ("input_ids", "position_ids", "attention_mask", "cu_seqlens"):
        mine, theirs = getattr(like, name), getattr(back, name)
        assert (mine is None and theirs is None) or torch.equal(mine, theirs), name
    assert [ref.token_offset for ref in back.refs] == [ref.token_offset for ref in like.refs]


OPTIONAL = {"verl": ("ref_logprobs", "proximal_logprobs"), "trl": ("ref_logprobs", "proximal_logprobs")}
OPTIONAL |= {"prime_rl": ("ref_logprobs",), "tinker": ()}


def random_samples(dialect: str, shapes: list[tuple[int, int]], seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for number, (p, c) in enumerate(shapes):
        how = provenance(sampling=SamplingParams(temperature=1.0 if dialect in ("trl", "tinker") else 0.5))
        made = sample(
            rng.integers(0, 99, p),
            rng.integers(0, 99, c),
            -rng.random(c),
            trajectory_id=f"t{number}",
            advantage=float(rng.normal()),
            provenance=how,
        )
        trained = made.loss_mask & (rng.random(p + c) < 0.7)
        optional = {
            name: np.where(trained, -rng.random(p + c), NAN).astype(np.float32)
            for name in OPTIONAL[dialect]
            if trained.any()
        }
        if dialect in ("verl", "prime_rl") and p + c > 1:
            optional["routed_experts"] = rng.integers(0, 9, (p + c - 1, 2, 3)).astype(np.int32)
        samples.append(replace(made, loss_mask=trained, **optional))
    return samples


LAYOUT = st.sampled_from(["padded", "packed"])
SIDE = st.sampled_from(["left", "right"])
shapes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=5)


@pytest.mark.parametrize("dialect", NAMES)
@settings(max_examples=40)
@given(
    shapes, st.sampled_from(["padded", "packed"]), st.sampled_from(["left", "right"]), st.integers(0, 2**31)
)
def test_there_and_back_is_the_identity_on_what_is_carried(dialect, shapes, layout, side, seed):
    samples = random_samples(dialect, shapes, seed)
    batch = collate(samples, layout=layout, padding=Padding(side=side, row_multiple=4))
    # A batch of the same sequences that says something else everywhere: what comes back is the dict's.
    strange = [
        replace(
            made,
            token_ids=made.token_ids + 1,
            loss_mask=made.turn >= 0,
            **{
                name: getattr(made, name) + np.float32(made.loss_mask)
                for name in DIALECTS[dialect].carries
                if name != "routed_experts" and getattr(made, name) is not None
            },
        )
        for made in samples
    ]
    back = unpack(from_dict(as_dict(batch, dialect), dialect, like=collate(strange, layout=layout)))
    for mine, theirs in zip(samples, back, strict=True):
        if dialect == "tinker" and len(mine) == 1:
            # N - 1 entries: there is no place for the one token.
            continue
        for name in ("token_ids", "loss_mask", *DIALECTS[dialect].carries):
            assert identical(getattr(mine, name), getattr(theirs, name)), name
