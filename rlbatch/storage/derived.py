"""The structure of all samples of a shard, checked and derived at once: what `Sample` does one by one.

A thousand samples cost little more than one. Where anything is not as it must be, nothing is derived, and the
samples are made one by one, so that the one that is wrong says so. Knows arrays; makes no sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.records import UNKNOWN_VERSION, Segment

PIECE = 2**16
"""Tokens that are compared at a time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Derived:
    """Of N samples with G runs of sampled tokens of one turn each."""

    first_run: NDArray[np.int64]
    """[N+1] the runs of sample i are first_run[i]:first_run[i+1]."""
    spans: NDArray[np.int64]
    """[G, 3] (start, stop, turn), counted in the sample's own tokens."""
    versions: NDArray[np.int32]
    """[G] the one version that drew the run; -1 where unknown or more than one."""
    num_loss_tokens: NDArray[np.int64]
    """[N] trained tokens, but for token 0."""

    def fields(self, indices: NDArray[np.int64]) -> dict[str, Sequence[Any]]:
        """The derived fields of these samples, each a list with one value a sample."""
        runs = list(zip(self.first_run[indices].tolist(), self.first_run[indices + 1].tolist(), strict=True))
        return {
            "segments": [_segments(self.spans[first:end]) for first, end in runs],
            "segment_versions": [tuple(self.versions[first:end].tolist()) for first, end in runs],
            "num_loss_tokens": self.num_loss_tokens[indices].tolist(),
        }


def derive(arrays: Mapping[str, NDArray[Any]], *, num_provenances: int) -> Derived | None:
    """Check the structure of all samples and find their runs; None where some sample's is not right.

    Args:
        arrays: of the shard, whose extents were checked.
        num_provenances: how many distinct ones the shard holds.
    """
    offsets = arrays["offsets"]
    if not (np.diff(offsets) > 0).all() or not _names_are_right(arrays, num_provenances):
        return None
    turn = arrays["turn"]
    if int(arrays["token_ids"].min()) < 0 or (turn[offsets[:-1]] != -1).any() or int(turn.min()) < -1:
        return None
    derived = _runs(offsets, turn, arrays["policy_version"], _num_loss_tokens(offsets, arrays["loss_mask"]))
    num_turns = np.repeat(np.diff(arrays["provenances.offsets"]), np.diff(derived.first_run))
    return None if (derived.spans[:, 2] >= num_turns).any() else derived


def _segments(spans: NDArray[np.int64]) -> tuple[Segment, ...]:
    return tuple([Segment(0, start, stop, turn) for start, stop, turn in spans.tolist()])


def _num_loss_tokens(offsets: NDArray[np.int64], loss_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    # A call a sample, and yet several times as fast as `np.add.reduceat` of booleans.
    counts = [np.count_nonzero(loss_mask[start + 1 : stop]) for start, stop in pairwise(offsets.tolist())]
    return np.array(counts, np.int64)


def _names_are_right(arrays: Mapping[str, NDArray[Any]], num_provenances: int) -> bool:
    sibling, num_siblings, provenances = arrays["sibling"], arrays["num_siblings"], arrays["provenances"]
    if (sibling < 0).any() or (sibling >= num_siblings).any():
        return False
    if len(provenances) and not 0 <= int(provenances.min()) <= int(provenances.max()) < num_provenances:
        return False
    if not all((np.diff(arrays[f"{name}.offsets"]) > 0).all() for name in ("sample_id", "trajectory_id")):
        return False
    return all(map(_is_utf8, (arrays["sample_id"], arrays["trajectory_id"], arrays["group_id"])))


def _is_utf8(text: NDArray[np.uint8]) -> bool:
    try:
        text.tobytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def _runs(
    offsets: NDArray[np.int64],
    turn: NDArray[np.int16],
    version: NDArray[np.int32],
    num_loss_tokens: NDArray[np.int64],
) -> Derived:
    # A run begins where the turn changes; token 0 of a sample is never sampled, so no run crosses samples.
    starts = np.append(0, _changes(turn))
    stops = np.append(starts[1:], len(turn))
    sampled = turn[starts] >= 0
    starts, stops = starts[sampled], stops[sampled]
    sample = np.searchsorted(offsets, starts, side="right") - 1
    # One version throughout: the next change behind the first token is not before the end.
    changes = np.append(_changes(version), len(version))
    next_change = changes[np.searchsorted(changes, starts, side="right")]
    own = offsets[sample]
    return Derived(
        first_run=np.searchsorted(sample, np.arange(len(offsets))),
        spans=np.stack([starts - own, stops - own, turn[starts].astype(np.int64)], axis=1),
        versions=np.where(next_change >= stops, version[starts], np.int32(UNKNOWN_VERSION)),
        num_loss_tokens=num_loss_tokens,
    )


def _changes(values: NDArray[Any]) -> NDArray[np.intp]:
    """Where a value is not that of the entry before."""
    # Piece by piece, in memory that is used again: a whole shard's would be fresh pages.
    later, earlier = values[1:], values[:-1]
    pieces = [
        np.flatnonzero(later[start : start + PIECE] != earlier[start : start + PIECE]) + (start + 1)
        for start in range(0, len(values), PIECE)
    ]
    return np.concatenate(pieces)
