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
    as_dict(collate([having, untrained], layout="packed"), dialect)


def back_and_forth(form, dialect: str, batch: Batch) -> set[str]:
    """Optional fields that the form itself carries: found in a batch that had none before."""
    bare = [
        replace(made, ref_logprobs=None, proximal_logprobs=None, routed_experts=None)
        for made in unpack(batch)
    ]
    back = from_dict(form, dialect, like=collate(bare, layout="packed"))
    names = ("ref_logprobs", "proximal_logprobs", "routed_experts")
    return {name for name in names if getattr(back, name) is not None}


@pytest.mark.parametrize("drop", [["advantage"], ["loss_mask"], ["token_ids"], "temperature"])
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
    back = from_dict(as_dict(like, dialect), dialect, like=like, padding=padding)
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
