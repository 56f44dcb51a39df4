"""What is wrong with the samples of a step, before any of them is handed over.

Every rank checks every sample of the step, not only its own share: then all set the same ones aside, agree on
the normalisers, and raise the same error in the same step, without a word between them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, SoundnessError, Where
from rlbatch.loader.options import Checks, KeepGroups
from rlbatch.packing import Room, too_long
from rlbatch.records import Origin, Sample
from rlbatch.soundness import check_sound
from rlbatch.storage.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The samples of one step as they were read."""

    samples: Sequence[Sample]
    origins: Sequence[Origin]
    repeats: Mapping[int, Origin]
    """Place in the list -> where the same sample id came before, in this store."""
    sources: Mapping[str, Shard]
    """Path -> the shard whose memory samples of that origin are views of; none where they are copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What became of the candidates."""

    sound: tuple[int, ...]
    """Places of those that go on."""
    faults: Mapping[int, tuple[Finding, ...]]
    """Place -> what is wrong with it, for those that are set aside."""
    warnings: tuple[Finding, ...]


def check_step(
    candidates: Candidates,
    checks: Checks,
    room: Room,
    *,
    keep_groups: KeepGroups,
    trainer_version: int | None,
) -> Checked:
    """Judge the samples of a step together.

    Raises:
        SoundnessError: a finding of severity error, where `checks.on_fault` is `error`; all are in it.
    """
    origins = candidates.origins
    findings = list(_misfits(candidates, room, keep_groups))
    findings += _repeats(candidates)
    told = {(found.code, found.where.path, found.where.sample) for found in findings}
    findings += (
        found
        for found in check_sound(
            candidates.samples,
            purpose=checks.purpose,
            vocab_size=checks.vocab_size,
            origins=origins,
            trainer_version=trainer_version,
            max_version_lag=checks.max_version_lag,
            group_size=checks.group_size,
        )
        if (found.code, found.where.path, found.where.sample) not in told
    )
    errors = [found for found in findings if _is_error(found, checks)]
    if errors and checks.on_fault == "error":
        raise SoundnessError.of(*errors)
    faults = _by_place(errors, origins)
    if keep_groups != "no" or checks.group_size is not None:
        _take_groups_along(faults, candidates.samples)
    if checks.purpose != "audit":
        _take_untrained_along(faults, candidates)
    return Checked(
        sound=tuple(at for at in range(len(origins)) if at not in faults),
        faults={at: tuple(faults[at]) for at in sorted(faults)},
        warnings=tuple(found for found in findings if found not in errors),
    )


def _is_error(found: Finding, checks: Checks) -> bool:
    # Of one batch it is a doubt; a whole step without trained tokens has no loss.
    return found.severity == "error" or (found.code == "nothing-trained" and checks.purpose != "audit")


def _misfits(candidates: Candidates, room: Room, keep_groups: KeepGroups) -> Iterator[Finding]:
    """Samples, or groups that must share a batch, which no batch can hold."""
    lengths = [len(sample) for sample in candidates.samples]
    for at in too_long(lengths, room):
        yield misfit(candidates.origins[at], room, f"{lengths[at]} tokens")
    if keep_groups != "batch":
        return
    for group, members in _groups(candidates.samples).items():
        num_tokens = room.tokens([lengths[at] for at in members])
        if num_tokens > room.max_tokens and max(lengths[at] for at in members) <= room.longest_row:
            found = f"{num_tokens} tokens in the {len(members)} samples of group {group!r}"
            for at in members:
                yield misfit(candidates.origins[at], room, found)


def misfit(origin: Origin, room: Room, found: str) -> Finding:
    """The finding on a sample that no batch can hold."""
    multiple = "" if room.sequence_multiple == 1 else f", each padded to {room.sequence_multiple}"
    return finding(
        "sample-too-long",
        where=Where(path=origin.path, sample=origin.index),
        expected=f"at most max_tokens = {room.max_tokens} tokens{multiple}",
        found=found,
    )


def _repeats(candidates: Candidates) -> Iterator[Finding]:
    for at, first in candidates.repeats.items():
        origin, sample = candidates.origins[at], candidates.samples[at]
        yield finding(
            "duplicate-sample",
            where=Where(path=origin.path, sample=origin.index, trajectory=sample.trajectory_id),
            expected="each sample once",
            found=f"sample_id {sample.sample_id!r} again, as in {first.path} sample {first.index}",
        )


def _by_place(errors: Sequence[Finding], origins: Sequence[Origin]) -> dict[int, list[Finding]]:
    place = {(origin.path, origin.index): at for at, origin in enumerate(origins)}
    faults: dict[int, list[Finding]] = defaultdict(list)
    for found in errors:
        # What is said of no one sample is said of all: that nothing is trained.
        own = None if found.where.sample is None else place[found.where.path, found.where.sample]
        for at in range(len(origins)) if own is None else [own]:
            faults[at].append(found)
    return faults


def _take_groups_along(faults: dict[int, list[Finding]], samples: Sequence[Sample]) -> None:
    for members in _groups(samples).values():
        errors = [found for at in members for found in faults.get(at, ())]
        if errors:
            for at in members:
                faults[at] = faults.get(at) or errors


def _take_untrained_along(faults: dict[int, list[Finding]], candidates: Candidates) -> None:
    """Set the rest aside too, where nothing that is left is trained: such a step has no loss."""
    left = [at for at in range(len(candidates.samples)) if at not in faults]
    if not left or any(candidates.samples[at].num_loss_tokens for at in left):
        return
    untrained = finding(
        "nothing-trained",
        where=Where(path=candidates.origins[left[0]].path),
        expected="at least one trained token",
        found=f"none in the {len(left)} samples that are left of {len(candidates.samples)}",
    )
    for at in left:
        faults[at] = [untrained]


def _groups(samples: Sequence[Sample]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for at, sample in enumerate(samples):
        if sample.group_id:
            groups[sample.group_id].append(at)
    return groups
