"""The form in which a model is called."""

import pytest
import scoring_cases as cases
import torch
from torch import nn

from rlbatch.collate import Padding, collate
from rlbatch.errors import RecordError
from rlbatch.scoring import model_inputs, trainer_logprobs


def test_padded_inputs_carry_an_integer_mask_and_no_cache():
    inputs = model_inputs(collate(cases.make_samples((3, 2), temperatures=(1, 1)), layout="padded"))
    assert sorted(inputs) == ["attention_mask", "input_ids", "position_ids", "use_cache"]
    assert inputs["use_cache"] is False
    assert inputs["attention_mask"].dtype == torch.int64
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]


def test_left_padding_counts_positions_from_the_first_token():
    samples = cases.make_samples((3, 2), temperatures=(1, 1))
    inputs = model_inputs(collate(samples, layout="padded", padding=Padding(side="left")))
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2], [0, 0, 1]]


def test_packed_inputs_have_no_mask_and_restart_positions():
    inputs = model_inputs(collate(cases.make_samples((3, 2), temperatures=(1, 1)), layout="packed"))
    assert sorted(inputs) == ["input_ids", "position_ids", "use_cache"]
    assert inputs["use_cache"] is False
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1]]


def test_what_is_no_model_or_no_batch_is_refused_by_name():
    model, samples = nn.Linear(1, 1), cases.make_samples((3,), temperatures=(1,))
    batch = collate(samples, layout="packed")
    with pytest.raises(
        RecordError, match=r"batch: expected Batch, found list; rlbatch\.collate\.collate makes"
    ):
        trainer_logprobs(model, samples)
    with pytest.raises(RecordError, match="batch: expected Batch, found dict"):
        trainer_logprobs(model, {})
    with pytest.raises(RecordError, match="model: expected a torch module, found function"):
        trainer_logprobs(lambda **_: None, batch)
