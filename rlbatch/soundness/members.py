"""Checks on samples as wholes: branches, duplicates, groups, and fields that only some have.

These look at names and lengths, and at tokens only where two samples may be the same.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Severity
from rlbatch.records import Origin, Sample
from rlbatch.soundness.subject import Members

MIN_SURPRISE = 50.0
"""Nats: what is drawn twice by chance with a probability below exp(-50) was not drawn twice."""

TAIL = 8
"""Values by which two samples may be the same before they are compared whole."""

MAX_SHOWN = 8
"""So many samples a finding names; the rest it counts."""

_SHARED_FIELDS = (
    "teacher_logprobs",
    "ref_logprobs",
    "proximal_logprobs",
    "routed_experts",
    "group_id",
    "reward",
)
"""Optional fields that all samples of a batch have, or none. `raw_inference_logprobs` follows provenance."""


def turn_prefix_broken(members: Members) -> Iterator[Finding]:
    """Samples that exist because a prompt did not extend what came before it."""
    for index, sample in enumerate(members.samples):
        if sample.sibling:
            sampled = sample.turn[sample.turn >= 0]
            yield finding(
                "turn-prefix-broken",
                where=members.where(index, turn=int(sampled[0]) if len(sampled) else None),
                expected="one sample a trajectory",
                found=f"sample {sample.sibling + 1} of {sample.num_siblings}; "
                "its prompt extends no earlier one",
            )


def duplicate_sample(members: Members) -> Iterator[Finding]:
    """Samples that come twice: of one id, or of tokens and logprobs that no second draw would give again."""
    by_id: dict[str, int] = {}
    by_tail: dict[bytes, list[int]] = defaultdict(list)
    lengths = [len(sample.token_ids) for sample in members.samples]
    occurs = Counter(lengths)
    for index, sample in enumerate(members.samples):
        first = by_id.setdefault(sample.sample_id, index)
        if first != index:
            yield _duplicate(members, index, first, f"sample_id {sample.sample_id!r} again", "error")
        elif occurs[lengths[index]] > 1:
            # The last values are of late tokens, where two draws have parted long since.
            alike = by_tail[sample.inference_logprobs[-TAIL:].tobytes()]
            twin = next((each for each in alike if _same_draw(sample, members.samples[each])), None)
            alike.append(index)
            if twin is not None:
                found = "the same tokens and logprobs under another sample_id"
                yield _duplicate(members, index, twin, found, "warning")


def group_incomplete(members: Members) -> Iterator[Finding]:
    """Groups with another number of trajectories than the caller expects."""
    size = members.expected.group_size
    if size is None:
        return
    groups: dict[str, dict[str, int]] = defaultdict(dict)
    for index, sample in enumerate(members.samples):
        if sample.group_id is not None:
            groups[sample.group_id].setdefault(sample.trajectory_id, index)
    for group, indices in groups.items():
        if len(indices) != size:
            first = min(indices.values())
            yield finding(
                "group-incomplete",
                where=members.where(first),
                expected=f"{size} trajectories a group",
                found=f"{len(indices)} in group {group!r}",
            )


def field_missing_in_some(members: Members) -> Iterator[Finding]:
    """Optional fields that some samples have and others lack."""
    for name in _SHARED_FIELDS:
        lacking = [at for at, sample in enumerate(members.samples) if getattr(sample, name) is None]
        if not lacking or len(lacking) == len(members.samples):
            continue
        yield finding(
            "field-missing-in-some",
            where=members.where(lacking[0]),
            expected=f"{name} in every sample or in none",
            found=f"none in {len(lacking)} of {len(members.samples)} samples: "
            f"{_listed(members.origins[at] for at in lacking)}",
        )


def _duplicate(members: Members, index: int, first: int, found: str, severity: Severity) -> Finding:
    return finding(
        "duplicate-sample",
        severity=severity,
        where=members.where(index),
        expected="each sample once",
        found=f"{found}, as in {_listed([members.origins[first]])}",
    )


def _same_draw(a: Sample, b: Sample) -> bool:
    if not np.array_equal(a.token_ids, b.token_ids):
        return False
    if a.inference_logprobs.tobytes() != b.inference_logprobs.tobytes():
        return False
    drawn = a.inference_logprobs[a.turn >= 0]
    return float(-drawn[np.isfinite(drawn)].sum(dtype=np.float64)) > MIN_SURPRISE


def _listed(origins: Iterable[Origin]) -> str:
    places: Sequence[str] = [
        f"{origin.index}" if origin.path is None else f"{origin.path} {origin.index}" for origin in origins
    ]
    rest = f" and {len(places) - MAX_SHOWN} more" if len(places) > MAX_SHOWN else ""
    return f"sample {', '.join(places[:MAX_SHOWN])}{rest}"
