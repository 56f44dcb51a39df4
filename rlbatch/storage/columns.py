"""Schema `rlbatch.samples`: which arrays a shard of N samples and T tokens has, and samples turned into them.

    offsets            int64 [N+1]  sample i is tokens offsets[i]:offsets[i+1] of every per-token array
    <token field>      [T]          each of `TOKEN_FIELDS`; an optional one only where some sample has it
    <column>           [N], or ragged: [M] with `<column>.offsets` int64 [N+1]
    <field>.present    bool [N]     where None is possible; what stands in the array for None means nothing
    routed_experts     uint8, ragged: the bytes of [T-1, L, K] of each sample, little-endian, C order; with
                       .itemsize, .num_layers and .num_choices (K), [N] each; absent where no sample has any,
                       itemsize 0 where one has none

    media              the pictures' arrays of each sample, see `media.py`

Text is UTF-8 in ragged uint8 columns. `provenances`, `finish_reasons` and `stop_reasons` are ragged columns
of indices, one a turn, into the distinct values that the metadata holds as JSON; the last are absent where no
sample has any.

Knows records and arrays; knows nothing of files.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rlbatch.records import (
    EXPERT_DTYPES,
    FINISH_REASONS,
    TOKEN_FIELDS,
    FinishReason,
    Provenance,
    Sample,
    SamplingParams,
    StopReason,
)
from rlbatch.storage.format import Schema, load_json
from rlbatch.storage.media import MEDIA, MEDIA_KINDS, encode_media

SAMPLES = Schema(name="rlbatch.samples", versions=("1",))

TEXT_ENCODING = ("utf-8", "surrogatepass")
"""Codec and error handler: any Python text comes back, lone surrogates too."""

PER_SAMPLE = "sample"
PER_BOUNDARY = "boundary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One value a sample."""

    name: str
    dtype: np.dtype[Any]
    ragged: bool = False
    """A run of values a sample; `<name>.offsets` has the boundaries."""
    nullable: bool = False
    """None is possible; `<name>.present` says where it is not."""
    optional: bool = False
    """Absent where no sample has any, as in shards of earlier releases."""


STOP_REASONS = "stop_reasons"

COLUMNS = (
    Column(name="sample_id", dtype=np.dtype(np.uint8), ragged=True),
    Column(name="trajectory_id", dtype=np.dtype(np.uint8), ragged=True),
    Column(name="group_id", dtype=np.dtype(np.uint8), ragged=True, nullable=True),
    Column(name="reward", dtype=np.dtype(np.float64), nullable=True),
    Column(name="sibling", dtype=np.dtype(np.int64)),
    Column(name="num_siblings", dtype=np.dtype(np.int64)),
    Column(name="provenances", dtype=np.dtype(np.int32), ragged=True),
    Column(name="finish_reasons", dtype=np.dtype(np.int32), ragged=True),
    Column(name=STOP_REASONS, dtype=np.dtype(np.int32), ragged=True, optional=True),
)


EXPERTS = "routed_experts"
EXPERT_COLUMNS: dict[str, np.dtype[Any]] = {
    f"{EXPERTS}.itemsize": np.dtype(np.uint8),
    f"{EXPERTS}.num_layers": np.dtype(np.int32),
    f"{EXPERTS}.num_choices": np.dtype(np.int32),
}
"""What makes an array of a sample's bytes."""

EXPERT_DTYPES_BY_SIZE = {dtype.itemsize: dtype for dtype in EXPERT_DTYPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One array that a shard may have."""

    name: str
    dtype: np.dtype[Any]
    extent: str
    """`PER_SAMPLE`: [N]; `PER_BOUNDARY`: [N+1]; else the offsets whose last entry is its length."""
    optional: bool = False


def _specs() -> Iterator[ArraySpec]:
    yield ArraySpec(name="offsets", dtype=np.dtype(np.int64), extent=PER_BOUNDARY)
    for spec in TOKEN_FIELDS:
        yield ArraySpec(name=spec.name, dtype=spec.dtype, extent="offsets", optional=spec.optional)
        if spec.optional:
            yield ArraySpec(
                name=f"{spec.name}.present", dtype=np.dtype(np.bool_), extent=PER_SAMPLE, optional=True
            )
    for column in COLUMNS:
        extent = f"{column.name}.offsets" if column.ragged else PER_SAMPLE
        yield ArraySpec(name=column.name, dtype=column.dtype, extent=extent, optional=column.optional)
        if column.ragged:
            yield ArraySpec(
                name=extent, dtype=np.dtype(np.int64), extent=PER_BOUNDARY, optional=column.optional
            )
        if column.nullable:
            yield ArraySpec(name=f"{column.name}.present", dtype=np.dtype(np.bool_), extent=PER_SAMPLE)
    boundaries = f"{EXPERTS}.offsets"
    yield ArraySpec(name=EXPERTS, dtype=np.dtype(np.uint8), extent=boundaries, optional=True)
    yield ArraySpec(name=boundaries, dtype=np.dtype(np.int64), extent=PER_BOUNDARY, optional=True)
    for name, dtype in EXPERT_COLUMNS.items():
        yield ArraySpec(name=name, dtype=dtype, extent=PER_SAMPLE, optional=True)
    for name in (MEDIA, MEDIA_KINDS):
        boundaries = f"{name}.offsets"
        yield ArraySpec(name=name, dtype=np.dtype(np.uint8), extent=boundaries, optional=True)
        yield ArraySpec(name=boundaries, dtype=np.dtype(np.int64), extent=PER_BOUNDARY, optional=True)


ARRAYS = {spec.name: spec for spec in _specs()}
"""Every array that a shard may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Samples as what a shard holds."""

    arrays: tuple[tuple[str, NDArray[Any]], ...]
    """Name and values, one-dimensional and contiguous."""
    documents: Mapping[str, str]
    """`provenances`, `finish_reasons` and perhaps `stop_reasons`: each a JSON list of the distinct ones."""


def encode(samples: Sequence[Sample]) -> Encoded:
    """Samples as arrays and documents."""
    offsets = _boundaries([len(sample) for sample in samples])
    provenances, provenance_list = _indexed([sample.provenances for sample in samples], provenance_text)
    finish_reasons, finish_reason_list = _indexed([sample.finish_reasons for sample in samples], json.dumps)
    documents = {"provenances": provenance_list, "finish_reasons": finish_reason_list}
    stop_arrays: list[tuple[str, NDArray[Any]]] = []
    if any(sample.stop_reasons for sample in samples):
        stop_reasons, documents[STOP_REASONS] = _indexed(
            [sample.stop_reasons for sample in samples], json.dumps
        )
        stop_arrays += _ragged(STOP_REASONS, stop_reasons)
    rewards = [sample.reward for sample in samples]
    arrays = [
        ("offsets", offsets),
        *_token_arrays(samples),
        *_text("sample_id", [sample.sample_id for sample in samples]),
        *_text("trajectory_id", [sample.trajectory_id for sample in samples]),
        *_text("group_id", [sample.group_id or "" for sample in samples]),
        _present("group_id", [sample.group_id for sample in samples]),
        ("reward", np.array([0.0 if reward is None else reward for reward in rewards], np.float64)),
        _present("reward", rewards),
        ("sibling", np.array([sample.sibling for sample in samples], np.int64)),
        ("num_siblings", np.array([sample.num_siblings for sample in samples], np.int64)),
        *_ragged("provenances", provenances),
        *_ragged("finish_reasons", finish_reasons),
        *stop_arrays,
        *_routed_experts(samples),
        *_media(samples),
    ]
    return Encoded(arrays=tuple(arrays), documents=documents)


def provenance_text(provenance: Provenance) -> str:
    """JSON of a provenance; two that are `identical` have the same text."""
    return json.dumps(asdict(provenance))


def read_provenances(text: str) -> tuple[Provenance, ...]:
    """The provenances of a document, in order.

    Raises:
        ValueError, TypeError, KeyError: not a list of provenances as this release knows them.
    """
    return tuple(_provenance(fields) for fields in load_json(text))


def read_finish_reasons(text: str) -> tuple[FinishReason | None, ...]:
    """The finish reasons of a document, in order.

    Raises:
        ValueError: not a list of finish reasons and nulls.
    """
    reasons = load_json(text)
    if not isinstance(reasons, list) or not all(reason in (None, *FINISH_REASONS) for reason in reasons):
        raise ValueError(f"not a list of nulls and {', '.join(FINISH_REASONS)}")
    return cast(tuple[FinishReason | None, ...], tuple(reasons))


def read_stop_reasons(text: str) -> tuple[StopReason | None, ...]:
    """The stop reasons of a document, in order.

    Raises:
        ValueError: not a list of ids, texts and nulls.
    """
    reasons = load_json(text)
    if not isinstance(reasons, list) or not all(type(reason) in (int, str, NoneType) for reason in reasons):
        raise ValueError("not a list of ids, texts and nulls")
    return tuple(reasons)


def _provenance(fields: dict[str, Any]) -> Provenance:
    return Provenance(**{**fields, "sampling": SamplingParams(**fields["sampling"])})


def _token_arrays(samples: Sequence[Sample]) -> Iterator[tuple[str, NDArray[Any]]]:
    for spec in TOKEN_FIELDS:
        values = [getattr(sample, spec.name) for sample in samples]
        if spec.optional:
            if all(value is None for value in values):
                continue
            yield _present(spec.name, values)
            values = [
                np.full(len(sample), spec.not_sampled, spec.dtype) if value is None else value
                for sample, value in zip(samples, values, strict=True)
            ]
        yield spec.name, np.concatenate(values)


def _routed_experts(samples: Sequence[Sample]) -> Iterator[tuple[str, NDArray[Any]]]:
    arrays = [sample.routed_experts for sample in samples]
    if all(array is None for array in arrays):
        return
    kinds = [(0, 0, 0) if array is None else (array.itemsize, *array.shape[1:]) for array in arrays]
    runs = [b"" if array is None else array.tobytes() for array in arrays]
    yield EXPERTS, np.frombuffer(b"".join(runs), np.uint8)
    yield f"{EXPERTS}.offsets", _boundaries([len(run) for run in runs])
    for at, (name, dtype) in enumerate(EXPERT_COLUMNS.items()):
        yield name, np.array([kind[at] for kind in kinds], dtype)


def _media(samples: Sequence[Sample]) -> Iterator[tuple[str, NDArray[Any]]]:
    if not any(sample.media for sample in samples):
        return
    encoded = [encode_media(sample.media) for sample in samples]
    for name, runs in (
        (MEDIA, [data for data, _ in encoded]),
        (MEDIA_KINDS, [kinds for _, kinds in encoded]),
    ):
        yield name, np.frombuffer(b"".join(runs), np.uint8)
        yield f"{name}.offsets", _boundaries([len(run) for run in runs])


def _present(name: str, values: Iterable[object]) -> tuple[str, NDArray[Any]]:
    return f"{name}.present", np.array([value is not None for value in values], np.bool_)


def _text(name: str, values: Sequence[str]) -> Iterator[tuple[str, NDArray[Any]]]:
    encoded = [value.encode(*TEXT_ENCODING) for value in values]
    yield name, np.frombuffer(b"".join(encoded), np.uint8)
    yield f"{name}.offsets", _boundaries([len(value) for value in encoded])


def _ragged(name: str, runs: Sequence[Sequence[int]]) -> Iterator[tuple[str, NDArray[Any]]]:
    yield name, np.array([index for run in runs for index in run], np.int32)
    yield f"{name}.offsets", _boundaries([len(run) for run in runs])


def _boundaries(lengths: Sequence[int]) -> NDArray[np.int64]:
    """[N] lengths -> [N+1] offsets: [2, 3] -> [0, 2, 5]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(lengths, np.int64))])


def _indexed(runs: Sequence[Sequence[Any]], to_json: Callable[[Any], str]) -> tuple[list[list[int]], str]:
    """Runs of values as runs of indices, and the JSON list of the distinct values that they index.

    Distinct by their JSON, not by equality: 1 equals 1.0 and would come back as the other.
    """
    indices: dict[str, int] = {}
    # Most samples share a few objects: ask each for its JSON once. They stay alive, so ids stay theirs.
    seen: dict[int, int] = {}
    result = []
    for run in runs:
        for value in run:
            if id(value) not in seen:
                seen[id(value)] = indices.setdefault(to_json(value), len(indices))
        result.append([seen[id(value)] for value in run])
    return result, f"[{', '.join(indices)}]"
