"""prime-rl's MicroBatch: the arguments of its constructor, for all sequences in one row, unshifted.

    input_ids, loss_mask, advantages, inference_logprobs, position_ids, temperatures, env_names: lists [T],
    entry t about token t; the trainer shifts
    sequence_lengths, seq_lens: lists [S]
    ref_logprobs: list [T] or absent; routed_experts: {data, shape [T, L, K], dtype}, the arguments of its
    RoutedExperts, or absent; a row of zeros where there was no pass

prime-rl names an environment for each token, for its metrics; here all are `rlbatch`.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.dialects import reading, rows
from rlbatch.dialects.dialect import Dialect, at_trained
from rlbatch.dialects.verl import experts_of
from rlbatch.errors import RecordError
from rlbatch.records import Sample

ENV_NAME = "rlbatch"

_STREAMS = {
    "advantages": "advantages",
    "inference_logprobs": "inference_logprobs",
    "ref_logprobs": "ref_logprobs",
}


def _encode(samples: Sequence[Sample], drop: frozenset[str]) -> dict[str, Any]:
    lengths = [len(sample) for sample in samples]
    form: dict[str, Any] = {
        "input_ids": _joined([sample.token_ids for sample in samples]),
        "loss_mask": _joined([sample.loss_mask for sample in samples]),
        "position_ids": list(chain.from_iterable(map(range, lengths))),
        "sequence_lengths": lengths,
        "seq_lens": lengths,
        "env_names": [ENV_NAME] * sum(lengths),
    }
    for name, key in _STREAMS.items():
        if name not in drop and rows.any_has(samples, name):
            form[key] = _joined(rows.trained_values(samples, name))
    if "temperature" not in drop:
        form["temperatures"] = _joined([at_trained(sample, sample.temperature, 1.0) for sample in samples])
    if "routed_experts" not in drop and rows.any_has(samples, "routed_experts"):
        experts = np.concatenate(experts_of(samples))
        form["routed_experts"] = {
            "data": experts.tobytes(),
            "shape": list(experts.shape),
            "dtype": str(experts.dtype),
        }
    return form


def _joined(columns: Sequence[NDArray[Any]]) -> list[Any]:
    joined: list[Any] = np.concatenate(columns).tolist()
    return joined


def _decode(form: Mapping[str, Any], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    lengths = [len(sample) for sample in samples]
    for key in ("seq_lens", "sequence_lengths"):
        if list(reading.parts(form, key)) != lengths:
            raise RecordError(f"from_dict: expected {key} of {lengths}, found {form[key]}")
    ends, total = np.cumsum(lengths)[:-1], sum(lengths)

    def column(key: str, kind: reading.Kind) -> list[NDArray[Any]]:
        """[T] a sample, of a list that is as long as all together."""
        return np.split(reading.numbers(form, key, total, kind), ends)

    positions = np.concatenate([np.arange(length) for length in lengths])
    found = reading.numbers(form, "position_ids", total, "ids")
    reading.require_same("position_ids", found, positions, "seq_lens")
    keys = {name: key for name, key in (*_STREAMS.items(), ("temperature", "temperatures")) if key in form}
    changed = rows.changes(
        samples,
        column("input_ids", "ids"),
        column("loss_mask", "mask"),
        {name: column(key, "values") for name, key in keys.items()},
    )
    if "routed_experts" in form:
        spec = reading.mapping(form["routed_experts"], "routed_experts")
        rows.with_experts(changed, samples, np.split(_experts(spec, samples), ends))
    return changed


def _experts(spec: Mapping[str, Any], samples: Sequence[Sample]) -> NDArray[Any]:
    """[T, L, K] of all samples."""
    shape = (sum(map(len, samples)), *rows.expert_shape(samples))
    try:
        flat, found = np.frombuffer(spec["data"], spec["dtype"]), list(spec["shape"])
    except (TypeError, ValueError) as error:
        raise RecordError(
            f"from_dict: expected routed_experts as bytes, found what is none ({error})"
        ) from error
    if found != list(shape) or flat.size != math.prod(shape) or flat.dtype.kind not in "iu":
        raise RecordError(
            f"from_dict: expected integer routed_experts of shape {list(shape)}, "
            f"found {found} and {flat.size} entries of {flat.dtype}"
        )
    return flat.reshape(shape)


PRIME_RL = Dialect(
    name="prime_rl",
    carries=(*_STREAMS, "temperature", "routed_experts"),
    keys=(
        *("input_ids", "loss_mask", "position_ids", "sequence_lengths", "seq_lens", "env_names"),
        *_STREAMS.values(),
        *("temperatures", "routed_experts"),
    ),
    encode=_encode,
    decode=_decode,
)
