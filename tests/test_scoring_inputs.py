"""The form in which a model is called."""

import scoring_cases as cases
import torch

from rlbatch.collate import Padding, collate
from rlbatch.scoring import model_inputs


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
