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

from rlbatch.dialects import rows
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
    if len(form["data"]) != len(samples):
        raise RecordError(f"from_dict: expected {len(samples)} data, found {len(form['data'])}")
    return [_changed(datum, sample) for datum, sample in zip(form["data"], samples, strict=True)]


def _changed(datum: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
    inputs = datum["loss_fn_inputs"]
    shape = (len(sample) - 1,)
    targets = rows.shaped(inputs, "target_tokens", shape).cpu().numpy()
    first = sample.token_ids[:1] if len(sample) == 1 else np.array(datum["model_input"][:1], np.int64)
    fields = {
        name: [_with_first(rows.shaped(inputs, key, shape))] for name, key in _INPUTS.items() if key in inputs
    }
    ids = np.concatenate([first, targets])
    (changed,) = rows.changes([sample], [ids], [_with_first(rows.shaped(inputs, "mask", shape))], fields)
    return changed


def _with_first(column: Tensor) -> NDArray[Any]:
    own = column.cpu().numpy()
    return np.concatenate([np.zeros(1, own.dtype), own])


TINKER = Dialect(name="tinker", carries=tuple(_INPUTS), encode=_encode, decode=_decode)
