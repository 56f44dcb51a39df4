"""tinker's Datum: a sequence each, target-aligned, N - 1 entries for N tokens.

    data: [{"model_input": list of N - 1 ids,
            "loss_fn_inputs": {"target_tokens": [N - 1] int64,
                               "logprobs", "advantages", "mask": [N - 1] float32}}]

`tinker.ModelInput.from_ints` and `tinker.TensorData.from_torch` take them as they are. The server computes at
temperature 1; it takes `mask` out before it is sent, as tinker-cookbook does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.dialects import reading, rows
from rlbatch.dialects.dialect import Dialect
from rlbatch.errors import RecordError
from rlbatch.records import Sample

_INPUTS = {"inference_logprobs": "logprobs", "advantages": "advantages"}


def _encode(samples: Sequence[Sample], drop: frozenset[str]) -> dict[str, Any]:
    return {"data": [_datum(sample, drop) for sample in samples]}


def _datum(sample: Sample, drop: frozenset[str]) -> dict[str, Any]:
    inputs = {
        "target_tokens": _behind_first(sample.token_ids.astype(np.int64)),
        "mask": _behind_first(sample.loss_mask.astype(np.float32)),
    }
    for name, key in _INPUTS.items():
        if name not in drop:
            inputs[key] = _behind_first(rows.trained_values([sample], name)[0])
    return {"model_input": sample.token_ids[:-1].tolist(), "loss_fn_inputs": inputs}


def _behind_first(column: NDArray[Any]) -> Tensor:
    # The one shift of this form: entry t is of token t + 1, which the input up to t predicts.
    return torch.from_numpy(column[1:].copy())


def _decode(form: Mapping[str, Any], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    data = reading.parts(form, "data")
    if len(data) != len(samples):
        raise RecordError(f"from_dict: expected {len(samples)} data, found {len(data)}")
    return [_changed(datum, at, sample) for at, (datum, sample) in enumerate(zip(data, samples, strict=True))]


def _changed(datum: object, at: int, sample: Sample) -> dict[str, Any]:
    place = reading.mapping(datum, f"data[{at}]")
    inputs = reading.mapping(place["loss_fn_inputs"], f"loss_fn_inputs of data[{at}]")
    length = len(sample) - 1
    targets = reading.tensor(inputs, "target_tokens", (length,), "ids")
    # Of a sequence of one token nothing is sent.
    model_input = reading.numbers(place, "model_input", length, "ids") if length else targets
    reading.require_same("model_input", model_input[1:], targets[:-1], "target_tokens")
    ids = np.concatenate([model_input[:1] if length else sample.token_ids, targets])
    fields = {
        name: [_with_first(reading.tensor(inputs, key, (length,), "values"))]
        for name, key in _INPUTS.items()
        if key in inputs
    }
    mask = _with_first(reading.tensor(inputs, "mask", (length,), "mask"))
    (changed,) = rows.changes([sample], [ids], [mask], fields)
    return changed


def _with_first(column: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([np.zeros(1, column.dtype), column])


TINKER = Dialect(name="tinker", carries=tuple(_INPUTS), keys=("data",), encode=_encode, decode=_decode)
