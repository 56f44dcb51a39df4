"""Models whose frequencies follow the longest sequence of a call: batches in which that shows are refused."""

import pytest
import scoring_cases as cases
import torch
import transformers

from rlbatch.collate import Padding, collate
from rlbatch.errors import ScoringError
from rlbatch.scoring import logits_for, logprob_head, model_inputs, trainer_logprobs

BOUNDARY = 28
"""Above what the proofs of isolation call the model with."""
_SIZES = {
    "vocab_size": cases.VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": BOUNDARY,
}
CONFIGS = {
    "longrope": lambda: transformers.LlamaConfig(
        **_SIZES, max_position_embeddings=4 * BOUNDARY, rope_parameters=LONGROPE
    ),
    "dynamic": lambda: transformers.LlamaConfig(
        **_SIZES,
        max_position_embeddings=BOUNDARY,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    ),
    "layers": lambda: transformers.Gemma3TextConfig(
        **_SIZES,
        head_dim=8,
        max_position_embeddings=4 * BOUNDARY,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": LONGROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}


def _model(name):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()


def _samples(*lengths):
    return cases.make_samples(lengths, temperatures=(1.0,) * len(lengths))


def _refused(model, batch):
    with torch.no_grad(), pytest.raises(ScoringError, match=r"\[rope-by-length\]") as caught:
        trainer_logprobs(model, batch)
    (found,) = caught.value.findings
    return found


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_short_sequence_beside_a_long_one_is_refused(name, layout):
    model = _model(name)
    samples = _samples(7, 9, 40)
    batch = collate(samples, layout=layout)
    # What is refused would be wrong indeed, by far more than rounding.
    with torch.no_grad():
        together = model(**model_inputs(collate(samples, layout="padded"))).logits[0, :7]
        alone = _model(name)(cases.token_ids(samples[0])[None]).logits[0]
    assert (together - alone).abs().max() > 0.01
    found = _refused(model, batch)
    at, length, count = (2, 40, 1) if name == "dynamic" else (0, 7, 2)
    assert (found.where.sample, found.where.start, found.where.stop) == (at, 0, length)
    assert found.found == f"{length} tokens in a batch with positions up to 40 ({count} such sequences of 3)"
    assert str(BOUNDARY) in found.expected
    with pytest.raises(ScoringError, match="rope-by-length"), logprob_head(model, batch):
        pass


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *[(name, (7, BOUNDARY, 9)) for name in CONFIGS],
        *[(name, (BOUNDARY + 1, 40)) for name in CONFIGS if name != "dynamic"],
    ],
)
def test_sequences_of_one_side_are_scored_as_if_alone(name, lengths, layout):
    samples = _samples(*lengths)
    batch = collate(samples, layout=layout)
    with torch.no_grad():
        found = cases.by_sample(batch, trainer_logprobs(_model(name), batch))
    for sample, each in zip(samples, found, strict=True):
        torch.testing.assert_close(each, cases.true_logprobs(_model(name), sample), atol=1e-4, rtol=0)


def test_positions_of_padding_count_as_the_model_counts_them():
    samples = _samples(7, 9)
    short = collate(samples, layout="padded")
    assert trainer_logprobs(_model("longrope"), short).shape == short.shape
    padded = collate(samples, layout="padded", padding=Padding(row_multiple=64))
    assert _refused(_model("longrope"), padded).found.startswith(
        "7 tokens in a batch with positions up to 57"
    )


def test_a_dynamic_model_keeps_the_frequencies_of_its_longest_call():
    """So that even a batch of one long sequence is not what it is alone: why any is refused."""
    ids = cases.token_ids(_samples(35)[0])[None]
    used = _model("dynamic")
    # The proofs are short calls, which bring the usual frequencies back.
    trainer_logprobs(used, collate(_samples(9), layout="padded"))
    with torch.no_grad():
        fresh = _model("dynamic")(ids).logits
        used(torch.arange(60)[None])
        assert (used(ids).logits - fresh).abs().max() > 0.01
    assert _refused(_model("dynamic"), collate(_samples(35), layout="padded")).where.sample == 0
    # Nor does one of just the usual length bring the usual ones back.
    assert _refused(used, collate(_samples(BOUNDARY), layout="padded")).where.sample == 0
    assert trainer_logprobs(used, collate(_samples(BOUNDARY - 1), layout="padded")).isfinite().all()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_logits_of_the_start_of_a_long_sequence_are_those_of_the_whole(layout):
    model = _model("longrope")
    samples = _samples(36, 40)
    batch = collate(samples, layout=layout)
    for index, segment in enumerate(batch.host_segments):
        found = logits_for(model)(batch, index, segment.start, segment.start + 4)
        with torch.no_grad():
            alone = model(cases.token_ids(samples[index])[None]).logits[0]
        first, _ = batch.tokens_of(segment)
        torch.testing.assert_close(found, alone[first - 1 : first + 3], atol=1e-4, rtol=0)
