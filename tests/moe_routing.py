"""The experts that the tiny mixture of experts chooses itself, in transformers."""

import torch
from transformers import PreTrainedModel

from rlbatch.batch import Batch

NUM_LAYERS, TOP_K = 3, 2


def routing_of(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
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
