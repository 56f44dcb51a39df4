"""Trainer logprobs over kept sets, from provenance to verdict: an engine's own values, and sets by hand.

`kept_sets/` holds what vLLM 0.32.0 sampled in process (float32, processed_logprobs, tinylm) with min_p, and
with several rules at once, which tells their order.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scoring_cases as cases
import torch
from builders import provenance, recorded_provenance, recorded_samples
from kept_by_hand import kept_by_hand

from rlbatch.alignment import require_aligned
from rlbatch.collate import collate
from rlbatch.errors import AlignmentError, SoundnessError
from rlbatch.records import SamplingParams
from rlbatch.scoring import kept_sets, load_model, logprob_head, model_inputs, trainer_logprobs
from rlbatch.soundness import require_sound

RECORDED = sorted((Path(__file__).parent / "data" / "vllm-0.32.0" / "kept_sets").glob("*.json"))
RULES = ({"top_k": 9}, {"top_p": 0.8}, {}, {"min_p": 0.03, "top_k": 30, "top_p": 0.95})


@pytest.fixture(scope="module")
def tinylm(tinylm_dir):
    return load_model(tinylm_dir, device="cpu", dtype=torch.float32)


def truncated(sample, temperature, **rules):
    """The sample as vLLM would have drawn it under `rules`."""
    how = provenance(sampling=SamplingParams(temperature=temperature, **rules))
    return replace(sample, provenances=(how,))


def made(seed=0):
    """One sample for each of `RULES`."""
    temperatures = (1.0, 0.7, 1.3, 1.0)
    samples = cases.make_samples((13, 5, 9, 11), seed=seed, temperatures=temperatures)
    return [
        truncated(sample, temperature, **rules)
        for sample, temperature, rules in zip(samples, temperatures, RULES, strict=True)
    ]


def kept_mask(logits, rules):
    """[T, V]; worked out a position at a time."""
    mask = torch.zeros_like(logits, dtype=torch.bool)
    for at, row in enumerate(logits.detach().double()):
        mask[at, kept_by_hand(row.tolist(), **rules)] = True
    return mask


def plain(model, sample, rules):
    """[T] logprobs of each token from the model's plain logits over the kept sets, 0 where untrained."""
    ids = cases.token_ids(sample)
    temperature = torch.tensor(sample.temperature.tolist())[1:, None]
    logits = model(ids[None]).logits[0, :-1] / temperature
    logits = logits.masked_fill(~kept_mask(logits, rules), -torch.inf)
    logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    mask = torch.tensor(sample.loss_mask.tolist())
    return torch.cat([torch.zeros(1), torch.where(mask[1:], logprobs, 0.0)])


def drawn_inside(model):
    """Samples whose targets lie in their kept sets: each sampled token is the most probable one but one."""
    samples = []
    for sample, rules in zip(made(), RULES, strict=True):
        ids = sample.token_ids.copy()
        for at in range(2, len(ids)):
            with torch.no_grad():
                logits = model(torch.tensor(ids[None, :at].tolist())).logits[0, -1] / float(
                    sample.temperature[at]
                )
            kept = kept_by_hand(logits.double().tolist(), **rules)
            ids[at] = sorted(kept, key=lambda i: -logits[i])[min(1, len(kept) - 1)]
        samples.append(replace(sample, token_ids=ids))
    return samples


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("purpose", ["audit", "train-truncated"])
def test_an_engines_kept_sets_are_found_again(path, layout, purpose, tinylm):
    content = json.loads(path.read_text())
    how = recorded_provenance(path)
    sampling = SamplingParams(**content["sampling"])
    samples = require_sound(
        recorded_samples(path, replace(how, sampling=sampling)), purpose=purpose, vocab_size=1536
    )
    batch = collate(samples, layout=layout, purpose=purpose)
    with torch.no_grad():
        logprobs = trainer_logprobs(tinylm, batch)
    # Enough of them were no certainty.
    assert int((batch.inference_logprobs[batch.loss_mask] < -0.01).sum()) > 80
    assert float((logprobs - batch.inference_logprobs)[batch.loss_mask].abs().max()) < 1e-4
    alignment = require_aligned(batch, logprobs, trainer_version=None)
    assert alignment.judged
    assert alignment.warnings == ()
    assert bool(torch.equal(alignment.compared, batch.loss_mask))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_values_and_gradients_are_those_of_plain_logits_over_the_sets(name, layout):
    model = cases.tiny_model(name)
    samples = drawn_inside(model)
    batch = collate(samples, layout=layout, purpose="train-truncated")
    rows = [plain(model, sample, rules) for sample, rules in zip(samples, RULES, strict=True)]
    weights = [torch.linspace(-1, 2, len(row)) for row in rows]
    sum((row * weight).sum() for row, weight in zip(rows, weights, strict=True)).backward()
    expected = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()

    with logprob_head(model, batch):
        logprobs = model(**model_inputs(batch)).logits
    for row, found in zip(rows, cases.by_sample(batch, logprobs.detach()), strict=True):
        torch.testing.assert_close(found, row.detach().double(), atol=1e-4, rtol=0)
    weight = torch.zeros(batch.shape)
    for (row, start, length), values in zip(cases.places(batch), weights, strict=True):
        weight[row, start : start + length - 1] = values[1:]
    (logprobs * weight).sum().backward()
    for key, parameter in model.named_parameters():
        size = float(expected[key].abs().max().clamp(min=1))
        torch.testing.assert_close(parameter.grad, expected[key], atol=1e-5 * size, rtol=1e-4)


def test_rules_stand_at_the_positions_of_their_segments():
    samples = [truncated(cases.make_sample([5, 6, 7, 8], num_prompt=2), 1.0, top_k=20, min_p=0.1)]
    samples.append(truncated(cases.make_sample([5, 6, 7], num_prompt=1), 1.0, top_p=0.5))
    # Position t predicts token t + 1.
    kept = kept_sets(collate(samples, layout="padded", purpose="audit"))
    assert kept.top_k.tolist() == [[0, 20, 20, 0], [0, 0, 0, 0]]
    assert kept.top_p.tolist() == [[1, 1, 1, 1], [0.5, 0.5, 1, 1]]
    assert kept.min_p.tolist() == [[0, np.float32(0.1), np.float32(0.1), 0], [0, 0, 0, 0]]
    kept = kept_sets(collate(samples, layout="packed", purpose="train-truncated"))
    assert kept.top_k.tolist() == [[0, 20, 20, 0, 0, 0, 0]]
    assert kept.top_p.tolist() == [[1, 1, 1, 1, 0.5, 0.5, 1]]


def test_nothing_is_renormalised_unless_asked_for():
    model = cases.tiny_model("llama")
    (sample,) = cases.make_samples((13,), temperatures=(1.0,))
    cut = truncated(sample, 1.0, top_k=2)
    batch = collate([cut], layout="padded", purpose="train")
    assert kept_sets(batch) is None
    assert kept_sets(collate([truncated(sample, 1.0)], layout="padded", purpose="audit")) is None
    with torch.no_grad():
        (found,) = cases.by_sample(batch, trainer_logprobs(model, batch))
    torch.testing.assert_close(found, cases.true_logprobs(model, sample), atol=1e-4, rtol=0)
    with pytest.raises(SoundnessError, match=r"\[incomparable\]"):
        require_sound([cut])
    with pytest.raises(AlignmentError, match=r"\[incomparable\]"):
        require_aligned(batch, torch.full(batch.shape, -1.0), trainer_version=None)


def test_training_that_asks_for_it_is_judged_with_gradient_and_without_what_lies_outside():
    (sample,) = cases.make_samples((40,), temperatures=(1.0,))
    batch = collate([truncated(sample, 1.0, top_k=20)], layout="padded", purpose="train-truncated")
    trainer = torch.full(batch.shape, -1.01)
    trainer[0, 7] = -torch.inf
    trainer.requires_grad_()
    alignment = require_aligned(batch, trainer, trainer_version=None)
    (found,) = alignment.warnings
    assert (found.code, found.severity) == ("outside-kept-set", "warning")
    # Position 7 predicts token 8.
    assert (found.where.start, found.where.stop) == (8, 9)
    assert found.found == "1 of 38 trained tokens outside, the first at inference logprob -1"
    assert alignment.metrics["rlbatch/num_outside_kept_set/sum"] == 1
    assert alignment.metrics["rlbatch/num_tokens/sum"] == 37
    # One in 38 is more than rounding explains.
    assert alignment.judged is False
    assert not alignment.compared[0, 7]
    assert [float(values[0, 7].detach()) for values in (alignment.log_ratio, alignment.ratio)] == [0, 1]
    alignment.ratio.sum().backward()
    assert trainer.grad[0, 7] == 0
    assert int((trainer.grad != 0).sum()) == 37


@pytest.mark.parametrize("outside", [0, 1, 2, 3])
def test_two_in_a_hundred_outside_are_rounding_and_more_are_not(outside):
    (sample,) = cases.make_samples((102,), temperatures=(1.0,))
    batch = collate([truncated(sample, 1.0, top_p=0.9)], layout="padded", purpose="audit")
    trainer = torch.full(batch.shape, -1.0)
    trainer[0, 20 : 20 + outside] = -torch.inf
    assert require_aligned(batch, trainer, trainer_version=None).judged is (outside <= 2)


def test_minus_infinity_is_still_an_error_where_no_set_was_kept():
    (sample,) = cases.make_samples((13,), temperatures=(1.0,))
    for how in ({}, {"top_k": 5}):
        purpose = "train" if how else "audit"
        batch = collate([truncated(sample, 1.0, **how)], layout="padded", purpose=purpose)
        trainer = torch.full(batch.shape, -1.0)
        trainer[0, 7] = -torch.inf
        with pytest.raises(AlignmentError, match=r"\[trainer-not-finite\]"):
            require_aligned(batch, trainer, trainer_version=None)
    batch = collate([truncated(sample, 1.0, top_k=5)], layout="padded", purpose="audit")
    trainer[0, 7] = torch.nan
    with pytest.raises(AlignmentError, match=r"\[trainer-not-finite\]"):
        require_aligned(batch, trainer, trainer_version=None)
