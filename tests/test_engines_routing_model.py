"""The engine's record of routed experts against the routing of the same weights in transformers."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import sample
from moe_routing import routing_of
from transformers import PreTrainedModel

from rlbatch.collate import Padding, collate
from rlbatch.scoring import load_model

MOE = Path(__file__).parent / "data" / "moe-vllm-0.32.0"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(MOE / "tinymoe", device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def samples() -> list:
    rows = json.loads((MOE / "rollouts.json").read_text())["rows"]
    return [
        sample(
            row["prompt_ids"],
            row["ids"],
            row["lp"],
            routed_experts=np.load(io.BytesIO(base64.b64decode(row["routed_experts"]))),
            trajectory_id=f"row{index}",
        )
        for index, row in enumerate(rows)
    ]


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_lie_at_the_positions_whose_pass_they_record(model, samples, side):
    batch = collate(samples, layout="padded", padding=Padding(side=side))
    recorded = batch.routed_experts
    held = recorded[..., 0, 0] >= 0
    assert int(held.sum()) == sum(len(each) - 1 for each in samples)
    own = routing_of(model, batch)
    # The same float32 weights on both sides.
    assert (own[held] == recorded[held]).all()


def test_rows_one_position_off_are_of_other_tokens(model, samples):
    """The corruption that shows the test above can fail."""
    batch = collate(samples, layout="padded")
    own = routing_of(model, batch)
    held = batch.routed_experts[:, :-1, 0, 0] >= 0
    late = (own[:, 1:][held] == batch.routed_experts[:, :-1][held]).float().mean()
    assert late < 0.6
