"""TRL's synchronous trainers (GRPO): completion-aligned rows, one advantage each, one temperature for all.

    prompt_ids, prompt_mask [B, P]      padded left
    completion_ids, completion_mask, sampling_per_token_logps, [old_, ref_]per_token_logps [B, C]
    tool_mask [B, C]                    only where some completion token is not trained
    advantages [B], num_items_in_batch []: trained tokens of the whole step, over all ranks

The temperature is an argument of the trainer (GRPOConfig.temperature), so it is not carried.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlbatch.dialects import reading, rows
from rlbatch.dialects.dialect import Dialect
from rlbatch.records import Sample

_LOGPROBS = {
    "inference_logprobs": "sampling_per_token_logps",
    "proximal_logprobs": "old_per_token_logps",
    "ref_logprobs": "ref_per_token_logps",
}


def _encode(samples: Sequence[Sample], drop: frozenset[str]) -> dict[str, Any]:
    ids, ones, trained = rows.ids(samples), rows.ones(samples), rows.masks(samples)
    form: dict[str, Any] = {
        "prompt_ids": rows.prompts(ids, samples),
        "prompt_mask": rows.prompts(ones, samples),
        "completion_ids": rows.completions(ids, samples),
        "completion_mask": rows.completions(ones, samples),
    }
    tool_mask = rows.completions(trained, samples)
    if not torch.equal(tool_mask, form["completion_mask"]):
        form["tool_mask"] = tool_mask
    for name, key in _LOGPROBS.items():
        if name not in drop and rows.any_has(samples, name):
            form[key] = rows.completions(rows.trained_values(samples, name), samples)
    if "advantages" not in drop:
        form["advantages"] = rows.one_a_row(samples, "advantages", 0.0)
    return form


def _decode(form: Mapping[str, Any], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    left = (len(samples), reading.width(form, "prompt_ids", len(samples)))
    right = (len(samples), reading.width(form, "completion_ids", len(samples)))
    mask = reading.tensor(form, "completion_mask", right, "mask")
    ids = rows.own_tokens(
        reading.tensor(form, "prompt_ids", left, "ids"),
        reading.tensor(form, "completion_ids", right, "ids"),
        reading.tensor(form, "prompt_mask", left, "mask"),
        mask,
        samples,
    )
    tool_mask = reading.tensor(form, "tool_mask", right, "mask") if "tool_mask" in form else mask
    fields = {
        name: rows.widened(reading.tensor(form, key, right, "values"), mask, samples)
        for name, key in _LOGPROBS.items()
        if key in form
    }
    if "advantages" in form:
        advantages = reading.tensor(form, "advantages", (len(samples),), "values")
        fields["advantages"] = rows.widened(np.broadcast_to(advantages[:, None], right), mask, samples)
    return rows.changes(samples, ids, rows.widened(tool_mask, mask, samples), fields)


TRL = Dialect(
    name="trl",
    carries=("advantages", *_LOGPROBS),
    keys=(
        *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask"),
        *_LOGPROBS.values(),
        *("advantages", "num_items_in_batch"),
    ),
    one_value_a_row=("advantages",),
    count_key="num_items_in_batch",
    encode=_encode,
    decode=_decode,
)
