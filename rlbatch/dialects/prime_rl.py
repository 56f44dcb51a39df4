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

from rlbatch.dialects import rows
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
    if list(form["seq_lens"]) != lengths:
        raise RecordError(f"from_dict: expected sequences of {lengths} tokens, found {form['seq_lens']}")
    keys = {name: key for name, key in _STREAMS.items() if key in form}
    if "temperatures" in form:
        keys["temperature"] = "temperatures"
    changed = rows.changes(
        samples,
        _parts(form, "input_ids", np.int64, lengths),
        _parts(form, "loss_mask", np.bool_, lengths),
        {name: _parts(form, key, np.float32, lengths) for name, key in keys.items()},
    )
    if "routed_experts" in form:
        experts = _experts(form["routed_experts"], samples)
        for change, sample, part in zip(changed, samples, _split(experts, lengths), strict=True):
            if sample.routed_experts is not None:
                change["routed_experts"] = part[:-1].astype(np.int32)
    return changed


def _parts(
    form: Mapping[str, Any], key: str, dtype: type[np.generic], lengths: Sequence[int]
) -> list[NDArray[Any]]:
    """[T] a sample, of a list that is as long as all together."""
    expected = f"from_dict: expected {key} of {sum(lengths)} numbers"
    try:
        joined = np.array(form[key], dtype)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{expected}, found what is none ({error})") from error
    if joined.shape != (sum(lengths),):
        raise RecordError(f"{expected}, found shape {list(joined.shape)}")
    return _split(joined, lengths)


def _experts(spec: Mapping[str, Any], samples: Sequence[Sample]) -> NDArray[Any]:
    """[T, L, K] of all samples."""
    entry = next((s.routed_experts.shape[1:] for s in samples if s.routed_experts is not None), ())
    shape = (sum(map(len, samples)), *entry)
    flat = np.frombuffer(spec["data"], spec["dtype"])
    if tuple(spec["shape"]) != shape or flat.size != math.prod(shape):
        raise RecordError(
            f"from_dict: expected routed_experts of shape {list(shape)}, "
            f"found {list(spec['shape'])} and {flat.size} entries"
        )
    return flat.reshape(shape)


def _split(joined: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    return np.split(joined, np.cumsum(lengths)[:-1])


PRIME_RL = Dialect(
    name="prime_rl",
    carries=(*_STREAMS, "temperature", "routed_experts"),
    encode=_encode,
    decode=_decode,
)
