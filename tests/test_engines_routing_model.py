"""The engine's record of routed experts against the routing of the same weights in transformers."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import sample
from transformers import PreTrainedModel

from rlbatch.collate import Padding, collate
from rlbatch.scoring import load_model

MOE = Path(__file__).parent / "data" / "moe-vllm-0.32.0"
NUM_LAYERS, TOP_K = 3, 2


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


def routing_of(model: PreTrainedModel, batch) -> torch.Tensor:
    """[B, T, L, K] of the model's own gates, by falling probability; each gate is asked by a hook."""
    seen: list[torch.Tensor] = []

    def note(gate: torch.nn.Module, arguments: tuple[torch.Tensor, ...], result: object) -> None:
        # From the router's own weights, whatever the gate returns.
        logits = torch.nn.functional.linear(arguments[0].float(), gate.weight.float())
        seen.append(logits.topk(TOP_K, dim=-1).indices.reshape(*batch.shape, TOP_K))

    hooks = [layer.mlp.gate.register_forward_hook(note) for layer in model.model.layers]
    with torch.no_grad():
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(seen) == NUM_LAYERS
    return torch.stack(seen, dim=2)


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
