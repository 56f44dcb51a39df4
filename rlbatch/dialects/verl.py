"""verl's DataProto (padded form): what `DataProto.from_dict(tensors=...)` takes.

prompts [B, P] padded left, responses [B, R] padded right
input_ids, attention_mask, position_ids [B, P + R]
response_mask, rollout_log_probs, advantages, [old_log_probs, ref_log_prob] [B, R]; response j is token j
temperature [B]                     one a row, as its engines take it
routed_experts [B, P + R, L, K]     0 where there was no pass, as verl pads
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlbatch.dialects import reading, rows
from rlbatch.dialects.dialect import Dialect
from rlbatch.records import Sample

_PER_TOKEN = {
    "advantages": "advantages",
    "inference_logprobs": "rollout_log_probs",
    "proximal_logprobs": "old_log_probs",
    "ref_logprobs": "ref_log_prob",
}


def _encode(samples: Sequence[Sample], drop: frozenset[str]) -> dict[str, Any]:
    ids, ones, trained = rows.ids(samples), rows.ones(samples), rows.masks(samples)
    prompts, responses = rows.prompts(ids, samples), rows.completions(ids, samples)
    attention_mask = torch.cat([rows.prompts(ones, samples), rows.completions(ones, samples)], dim=1)
    form: dict[str, Any] = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": rows.completions(trained, samples),
    }
    for name, key in _PER_TOKEN.items():
        if name not in drop and rows.any_has(samples, name):
            form[key] = rows.completions(rows.trained_values(samples, name), samples)
    if "temperature" not in drop:
        form["temperature"] = rows.one_a_row(samples, "temperature", 1.0)
    if "routed_experts" not in drop and rows.any_has(samples, "routed_experts"):
        experts = experts_of(samples)
        form["routed_experts"] = torch.cat(
            [rows.prompts(experts, samples), rows.completions(experts, samples)], dim=1
        )
    return form


def experts_of(samples: Sequence[Sample]) -> list[NDArray[np.int32]]:
    """[T, L, K] a sample: the last row is of zeros, and all of a sample without, which trains nothing."""
    entry = next(sample.routed_experts for sample in samples if sample.routed_experts is not None).shape[1:]
    columns = []
    for sample in samples:
        column = np.zeros((len(sample), *entry), np.int32)
        if sample.routed_experts is not None:
            column[:-1] = sample.routed_experts
        columns.append(column)
    return columns


def _decode(form: Mapping[str, Any], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    num_rows, width = len(samples), reading.width(form, "prompts", len(samples))
    shape = (num_rows, reading.width(form, "responses", num_rows))
    prompts = reading.tensor(form, "prompts", (num_rows, width), "ids")
    responses = reading.tensor(form, "responses", shape, "ids")
    attention_mask = reading.tensor(form, "attention_mask", (num_rows, width + shape[1]), "mask")
    _require_agreement(form, np.concatenate([prompts, responses], axis=1), attention_mask)
    left, right = attention_mask[:, :width], attention_mask[:, width:]
    ids = rows.own_tokens(prompts, responses, left, right, samples)
    trained = rows.widened(reading.tensor(form, "response_mask", shape, "mask"), right, samples)
    fields = {
        name: rows.widened(reading.tensor(form, key, shape, "values"), right, samples)
        for name, key in _PER_TOKEN.items()
        if key in form
    }
    if "temperature" in form:
        temperature = reading.tensor(form, "temperature", (num_rows,), "values")
        fields["temperature"] = rows.widened(np.broadcast_to(temperature[:, None], shape), right, samples)
    changed = rows.changes(samples, ids, trained, fields)
    if "routed_experts" in form:
        whole = (*attention_mask.shape, *rows.expert_shape(samples))
        experts = reading.tensor(form, "routed_experts", whole, "ids")
        own = rows.own_tokens(experts[:, :width], experts[:, width:], left, right, samples)
        rows.with_experts(changed, samples, own)
    return changed


def _require_agreement(
    form: Mapping[str, Any], token_ids: NDArray[Any], attention_mask: NDArray[np.bool_]
) -> None:
    """Refuse whole sequences that are not their two parts, or positions that do not count their tokens."""
    expected = {
        "input_ids": (token_ids, "prompts and responses"),
        "position_ids": (attention_mask.cumsum(axis=1) - 1, "attention_mask"),
    }
    for key, (values, source) in expected.items():
        found = reading.tensor(form, key, attention_mask.shape, "ids")
        reading.require_same(key, found[attention_mask], values[attention_mask], source)


VERL = Dialect(
    name="verl",
    carries=(*_PER_TOKEN, "temperature", "routed_experts"),
    keys=(
        *("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"),
        *_PER_TOKEN.values(),
        *("temperature", "routed_experts"),
    ),
    one_value_a_row=("temperature",),
    encode=_encode,
    decode=_decode,
)
