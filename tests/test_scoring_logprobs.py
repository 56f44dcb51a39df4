"""Trainer logprobs against float64 copies of the models on each sequence alone, and against the engine."""

import json

import pytest
import scoring_cases as cases
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlbatch.collate import Padding, collate
from rlbatch.errors import PackingLeakError, ScoringError
from rlbatch.scoring import load_model, logprob_head, model_inputs, trainer_logprobs

LAYOUTS = [("padded", "right"), ("padded", "left"), ("packed", "right")]


@pytest.mark.parametrize(("layout", "side"), LAYOUTS)
@pytest.mark.parametrize(("name", "attention"), cases.CASES)
def test_every_layout_scores_each_sequence_as_if_alone(name, attention, layout, side, device):
    model = cases.tiny_model(name, attention=attention).to(device)
    samples = cases.make_samples()
    batch = collate(samples, layout=layout, padding=Padding(side=side)).to(device)
    with torch.no_grad():
        logprobs = trainer_logprobs(model, batch)
    assert logprobs.dtype == torch.float32
    assert logprobs.shape == batch.target_ids.shape
    for sample, found in zip(samples, cases.by_sample(batch, logprobs), strict=True):
        expected = cases.true_logprobs(model, sample)
        assert expected.min() < -2, "the truth must not be near 0, or masks could pass for it"
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite"])
def test_the_tiny_models_change_their_logits_enough_to_show(name):
    # Guards the test above: without the transform its values would be off by far more than its tolerance.
    model = cases.tiny_model(name)
    ids = cases.token_ids(cases.make_samples()[0])[None]
    untreated = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: untreated.append(output))
    with torch.no_grad():
        logits = model(ids).logits
    hook.remove()
    assert (untreated[0].log_softmax(-1) - logits.log_softmax(-1)).abs().max() > 0.5


@pytest.mark.parametrize(("layout", "side"), LAYOUTS)
@pytest.mark.parametrize("name", list(cases.CONFIGS))
def test_gradient_through_the_head_is_that_of_plain_logits(name, layout, side):
    model = cases.tiny_model(name)
    batch = collate(cases.make_samples(), layout=layout, padding=Padding(side=side))
    weights = torch.linspace(-1, 2, batch.loss_mask.numel()).reshape(batch.loss_mask.shape)

    logits = model(**model_inputs(batch)).logits / batch.temperature[..., None]
    plain = logits.log_softmax(-1).gather(-1, batch.target_ids.clamp(min=0)[..., None])[..., 0]
    (weights * plain)[batch.loss_mask].sum().backward()
    expected = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()

    (weights * trainer_logprobs(model, batch)).sum().backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            expected[key],
            atol=1e-5 * float(expected[key].abs().max().clamp(min=1)),
            rtol=1e-4,
        )


def test_backward_may_come_after_the_context_is_left():
    model = cases.tiny_model("gemma2")
    batch = collate(cases.make_samples(), layout="padded")
    with logprob_head(model, batch):
        logprobs = model(**model_inputs(batch)).logits
    assert model.config.final_logit_softcapping == 5.0
    logprobs.sum().backward()
    assert model.lm_head.weight.grad.abs().max() > 0


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_recorded_rollouts_get_the_logprobs_that_the_engine_gave(layout, data_dir, tinylm_dir, device):
    rows = json.loads((data_dir / "rollouts" / "fp32_raw__t1.json").read_text())["rows"]
    model = load_model(tinylm_dir, device=device, dtype=torch.float32)
    samples = [
        cases.make_sample(
            row["prompt_ids"] + row["ids"], num_prompt=len(row["prompt_ids"]), logprobs=row["lp"]
        )
        for row in rows
    ]
    batch = collate(samples, layout=layout).to(device)
    with torch.no_grad():
        logprobs = trainer_logprobs(model, batch)
    trained = batch.loss_mask
    assert int(trained.sum()) == sum(len(row["ids"]) for row in rows)
    assert (logprobs - batch.inference_logprobs)[trained].abs().max() < 1e-4


def test_untrained_positions_are_0_whatever_their_ids():
    model = cases.tiny_model("llama")
    batch = collate(cases.make_samples(), layout="padded")
    with torch.no_grad():
        logprobs = trainer_logprobs(model, batch)
    assert (logprobs[~batch.loss_mask] == 0).all()
    assert (logprobs[batch.loss_mask] < 0).all()


def test_bfloat16_model_gives_float32_near_the_truth():
    model = cases.tiny_model("granite").to(torch.bfloat16)
    sample = cases.make_samples((13,), temperatures=(1.0,))[0]
    batch = collate([sample], layout="packed")
    with torch.no_grad():
        logprobs = trainer_logprobs(model, batch)
    assert logprobs.dtype == torch.float32
    expected = cases.true_logprobs(model, sample)
    torch.testing.assert_close(cases.by_sample(batch, logprobs)[0], expected, atol=0.1, rtol=0)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_autocast_is_allowed_for_as_the_rounding_it_is(layout):
    # float32 weights, bfloat16 products: no leak and no unknown head.
    model = cases.tiny_model("granite", attention="sdpa")
    sample = cases.make_samples((13,), temperatures=(1.0,))[0]
    batch = collate([sample], layout=layout)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs = trainer_logprobs(model, batch)
    assert logprobs.dtype == torch.float32
    expected = cases.true_logprobs(model, sample)
    torch.testing.assert_close(cases.by_sample(batch, logprobs)[0], expected, atol=0.1, rtol=0)


def test_float64_model_answers_in_float32():
    model = cases.tiny_model("llama").double()
    sample = cases.make_samples((13,), temperatures=(1.0,))[0]
    batch = collate([sample], layout="padded")
    with torch.no_grad():
        logprobs = trainer_logprobs(model, batch)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(
        cases.by_sample(batch, logprobs)[0], cases.true_logprobs(model, sample), atol=1e-6, rtol=0
    )


def test_no_tensor_is_as_large_as_the_logits_of_all_tokens():
    # More tokens and columns than the op handles at once, in float32, with gradient.
    num_tokens, vocab_size = 1500, 9000
    model = cases.tiny_model("llama", attention="sdpa", vocab_size=vocab_size, max_position_embeddings=1000)
    samples = [cases.make_sample([seed + 1] * 750, num_prompt=2, name=f"s{seed}") for seed in range(2)]
    batch = collate(samples, layout="packed")
    trainer_logprobs(model, batch)
    with _Sizes() as sizes:
        trainer_logprobs(model, batch).sum().backward()
    assert num_tokens * 32 in sizes.seen, "the hidden states were not even seen: nothing was watched"
    assert max(sizes.seen) < num_tokens * vocab_size / 2


class _Sizes(TorchDispatchMode):
    """Elements of every floating tensor that an operation gives."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        for value in tree_leaves(answer):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.seen.add(value.numel())
        return answer


def test_an_id_beyond_the_vocabulary_is_named_before_the_model_runs():
    model = cases.tiny_model("llama")
    sample = cases.make_sample([1, 5, cases.VOCAB_SIZE, 2], num_prompt=1)
    with pytest.raises(
        ScoringError, match=r"found:    96 in row 0, position 2 of the batch \(1 such"
    ) as caught:
        trainer_logprobs(model, collate([sample], layout="padded"))
    assert caught.value.code == "token-out-of-range"


def test_a_leaking_model_is_refused_for_packed_batches_only():
    model = cases.tiny_model("llama", cls=cases.leaking_llama())
    samples = cases.make_samples()
    with torch.no_grad():
        padded = trainer_logprobs(model, collate(samples, layout="padded"))
    for sample, found in zip(
        samples, cases.by_sample(collate(samples, layout="padded"), padded), strict=True
    ):
        torch.testing.assert_close(found, cases.true_logprobs(model, sample), atol=1e-4, rtol=0)
    with pytest.raises(PackingLeakError):
        trainer_logprobs(model, collate(samples, layout="packed"))
