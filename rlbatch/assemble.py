"""`Trajectory` -> `Sample`s: turns joined where each prompt extends what came before, branched where not.

Ids decide, exactly; nothing is encoded again. Tokens between turns (tools, templates) are context: untrained.
Every sampled token is trained in exactly one sample. Knows nothing of engines or trainers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, RecordError, Where
from rlbatch.prefix import Break, BreakKind, find_break, num_common
from rlbatch.records import TOKEN_FIELDS, UNKNOWN_VERSION, Sample, Trajectory, Turn
from rlbatch.records.structure import scalar, shown

MAX_VERSION = 2**31 - 1
"""What `policy_version` holds. A larger decimal label, such as a time in ms, is a name like any other."""

_SEND_IDS = "send the exact ids of the earlier turns back to the engine"

_CAUSES: Mapping[BreakKind, tuple[str, str]] = {
    "stripped thinking": (
        "the chat template leaves earlier thinking out when it renders the history again",
        "send the earlier ids back, or let each turn be a sample of its own, as it is now",
    ),
    "re-tokenised": ("the completion's text was encoded again: other ids, or a lost stop token", _SEND_IDS),
    "template suffix": ("the template's own tokens at a turn's edge were lost or put in again", _SEND_IDS),
    "tool boundary": ("tool or user messages between turns were rendered or encoded otherwise", _SEND_IDS),
    "shortened": (
        "the history was cut (a retry from an earlier point, or a context limit)",
        "keep retries in trajectories of their own",
    ),
    "another prompt": (
        "another conversation, or a system prompt that changed",
        "give each conversation a trajectory of its own",
    ),
    "rewritten": (
        "the client rewrote what the model had said, or its text encodes to other ids throughout",
        _SEND_IDS,
    ),
}
"""Likely cause and fix of each kind of break."""


@dataclass(slots=True)
class _Branch:
    """Turns whose prompts extend one another; becomes one sample."""

    token_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Prompt and completion of the last turn: all tokens so far."""
    turns: list[int] = field(default_factory=list)

    def append(self, index: int, turn: Turn) -> None:
        self.turns.append(index)
        self.token_ids = np.concatenate([turn.prompt_token_ids, turn.completion_token_ids])


def to_samples(trajectory: Trajectory, versions: Mapping[str, int] | None = None) -> list[Sample]:
    """The trainable sequences of one rollout.

    A turn joins the longest earlier sequence that its prompt begins with, token by token. Where there is
    none it starts a sequence of its own with its whole prompt as context, and `prefix_findings` says so.

    Args:
        trajectory: its turns in order.
        versions: every version label of the engine to its `policy_version`. Without a mapping decimal labels
            up to 2**31 - 1 convert themselves, and others are unknown (-1).

    Returns:
        One sample, or several where the prefix broke.

    Raises:
        RecordError: `versions` lacks a label that the trajectory has, or gives it no such number; or the
            turns of a sample have routed experts for some of its tokens only, or of other layers or kinds.

    Example:
        turn 0 [1, 5] -> [7, 2], turn 1 [1, 5, 7, 2, 9] -> [8]: one sample [1, 5, 7, 2, 9, 8],
        trained at 2:4 and 5:6
    """
    branches = _branches(trajectory)
    return [
        _to_sample(trajectory, branch, sibling, len(branches), versions)
        for sibling, branch in enumerate(branches)
    ]


def prefix_findings(trajectory: Trajectory) -> tuple[Finding, ...]:
    """A `turn-prefix-broken` for every turn after the first whose prompt extends no earlier sequence.

    `found` begins with the kind of break, one of `rlbatch.prefix.BreakKind`.
    """
    findings: list[Finding] = []
    _branches(trajectory, findings)
    return tuple(findings)


def _branches(trajectory: Trajectory, findings: list[Finding] | None = None) -> list[_Branch]:
    """The sequences of a trajectory; `findings`, where given, gets one for each turn that begins another."""
    branches: list[_Branch] = []
    for index, turn in enumerate(trajectory.turns):
        branch = _longest_prefix(branches, turn)
        if branch is None:
            if branches and findings is not None:
                findings += _broken(trajectory, index, branches)
            branch = _Branch()
            branches.append(branch)
        branch.append(index, turn)
    return branches


def _longest_prefix(branches: Sequence[_Branch], turn: Turn) -> _Branch | None:
    prompt = turn.prompt_token_ids
    fitting = [branch for branch in branches if num_common(branch.token_ids, prompt) == len(branch.token_ids)]
    return max(fitting, key=lambda branch: len(branch.token_ids), default=None)


def _broken(trajectory: Trajectory, index: int, branches: Sequence[_Branch]) -> list[Finding]:
    """What kind of break this turn's prompt has with the sequence that it follows furthest."""
    prompt = trajectory.turns[index].prompt_token_ids
    nearest = max(branches, key=lambda branch: num_common(branch.token_ids, prompt))
    found = find_break(nearest.token_ids, _sampled(trajectory, nearest), prompt)
    if found is None:
        return []
    likely, fix = _CAUSES[found.kind]
    return [
        finding(
            "turn-prefix-broken",
            where=Where(trajectory=trajectory.trajectory_id, turn=index, start=found.start, stop=len(prompt)),
            expected=f"a prompt that begins with the {len(nearest.token_ids)} tokens "
            f"of turn {nearest.turns[-1]}",
            found=f"{found.kind}: the first {found.start} tokens agree, then {_difference(found)}; "
            f"turn {index} becomes a sample of its own",
            likely=likely,
            fix=fix,
        )
    ]


def _difference(found: Break) -> str:
    """Which tokens of the earlier sequence do not come again, and how many stand instead."""
    num_new = found.prompt_stop - found.start
    if found.kind == "shortened":
        return f"the prompt ends within tokens {found.start}:{found.stop}"
    if not found.resumes:
        return f"nothing of tokens {found.start}:{found.stop} comes again"
    if found.start == found.stop:
        return f"{num_new} tokens are put in"
    lost = f"tokens {found.start}:{found.stop}"
    return f"{lost} are left out" if not num_new else f"{lost} are {num_new} others"


def _sampled(trajectory: Trajectory, branch: _Branch) -> NDArray[np.bool_]:
    """[T]; True = the engine drew this token of the branch."""
    sampled = np.zeros(len(branch.token_ids), np.bool_)
    for index in branch.turns:
        turn = trajectory.turns[index]
        start = len(turn.prompt_token_ids)
        sampled[start : start + len(turn.completion_token_ids)] = True
    return sampled


def _to_sample(
    trajectory: Trajectory,
    branch: _Branch,
    sibling: int,
    num_siblings: int,
    versions: Mapping[str, int] | None,
) -> Sample:
    columns = _Columns(branch.token_ids)
    for index in branch.turns:
        columns.write(trajectory, index, versions)
    return Sample(
        token_ids=columns.token_ids,
        inference_logprobs=columns.inference_logprobs,
        loss_mask=columns.turn >= 0,
        advantages=columns.advantages,
        policy_version=columns.policy_version,
        temperature=columns.temperature,
        turn=columns.turn,
        raw_inference_logprobs=columns.raw_inference_logprobs if columns.has_raw else None,
        sample_id=f"{trajectory.trajectory_id}:{sibling}",
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        reward=trajectory.reward,
        sibling=sibling,
        num_siblings=num_siblings,
        routed_experts=_routed_experts(trajectory, branch),
        provenances=tuple(turn.provenance for turn in trajectory.turns),
        finish_reasons=tuple(turn.finish_reason for turn in trajectory.turns),
        stop_reasons=tuple(turn.stop_reason for turn in trajectory.turns),
    )


class _Columns:
    """The per-token fields of one sample while its turns are written into them."""

    def __init__(self, token_ids: NDArray[np.int32]) -> None:
        self.token_ids = token_ids
        self.has_raw = False
        blank = {spec.name: spec for spec in TOKEN_FIELDS}

        def column(name: str) -> NDArray[Any]:
            return np.full(len(token_ids), blank[name].not_sampled, blank[name].dtype)

        self.inference_logprobs = column("inference_logprobs")
        self.raw_inference_logprobs = column("raw_inference_logprobs")
        self.advantages = column("advantages")
        self.policy_version = column("policy_version")
        self.temperature = column("temperature")
        self.turn = column("turn")

    def write(self, trajectory: Trajectory, index: int, versions: Mapping[str, int] | None) -> None:
        turn = trajectory.turns[index]
        start = len(turn.prompt_token_ids)
        span = slice(start, start + len(turn.completion_token_ids))
        self.inference_logprobs[span] = turn.inference_logprobs
        self.advantages[span] = np.nan if trajectory.advantage is None else trajectory.advantage
        self.turn[span] = index
        self.temperature[span] = turn.provenance.divisor
        if turn.raw_inference_logprobs is not None:
            self.has_raw = True
            self.raw_inference_logprobs[span] = turn.raw_inference_logprobs
        for part in turn.policy_versions:
            self.policy_version[start + part.start : start + part.stop] = _version(part.label, versions)


def _routed_experts(trajectory: Trajectory, branch: _Branch) -> NDArray[np.integer] | None:
    """[T-1, L, K]: each turn's rows from the first that no earlier turn has.

    Rows that a later turn says again are of the same tokens passed through a second time; those that were in
    force when the tokens were drawn are kept.
    """
    parts: list[NDArray[np.integer]] = []
    num_rows = 0
    turns = [trajectory.turns[index] for index in branch.turns]
    num_with = sum(turn.routed_experts is not None for turn in turns)
    # A turn that was aborted before its first token has passed through nothing that could be asked for.
    num_without = sum(turn.routed_experts is None and len(turn.completion_token_ids) > 0 for turn in turns)
    if num_with and num_without:
        raise RecordError(
            f"Trajectory {trajectory.trajectory_id!r}: expected routed experts of every turn of a sample "
            f"or of none, found them in {num_with} of {num_with + num_without} that drew tokens"
        )
    for index in branch.turns:
        turn = trajectory.turns[index]
        rows, start = turn.routed_experts, turn.routed_experts_start
        place = f"Trajectory {trajectory.trajectory_id!r}, turn {index}: expected routed experts"
        if rows is None:
            continue
        if start > num_rows:
            raise RecordError(f"{place} from token {num_rows} on, which no earlier turn has, found {start}")
        if parts and (rows.dtype != parts[0].dtype or rows.shape[1:] != parts[0].shape[1:]):
            raise RecordError(
                f"{place} of {parts[0].dtype} [.., {', '.join(map(str, parts[0].shape[1:]))}] as before, "
                f"found {rows.dtype} {list(rows.shape)}"
            )
        parts.append(rows[num_rows - start :])
        num_rows = start + len(rows)
    if parts and num_rows != len(branch.token_ids) - 1:
        raise RecordError(
            f"Trajectory {trajectory.trajectory_id!r}: expected routed experts of "
            f"{len(branch.token_ids) - 1} tokens, found {num_rows}: the last turn drew nothing and has none; "
            "leave it out"
        )
    return np.concatenate(parts) if parts else None


def _version(label: str, versions: Mapping[str, int] | None) -> int:
    if versions is None:
        # Of other digits or more of them it is a name.
        is_number = label.isascii() and label.isdecimal() and len(label) <= len(str(MAX_VERSION))
        return int(label) if is_number and int(label) <= MAX_VERSION else UNKNOWN_VERSION
    if label not in versions:
        raise RecordError(f"versions: expected every label of the trajectory, found none for {label!r}")
    version = scalar(f"versions[{label!r}]", versions[label], int)
    if not 0 <= version <= MAX_VERSION:
        raise RecordError(f"versions[{label!r}]: expected from 0 to {MAX_VERSION}, found {shown(version)}")
    return version
