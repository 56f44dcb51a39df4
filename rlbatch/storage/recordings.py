"""Recorded JSON, read as samples: rollouts, reply wrappers, and `.jsonl` of either.

    rollouts  {sampling, rows: [{prompt_ids, ids, lp, ...}, ...]}, a row as `RecordedRow` says
    wrapper   {endpoint, request, status, response | sse | response_text}

`sampling` lists what differed from neutral. A row with a fault of its own (counts, nulls, infinities) comes
out as a finding in the place of its sample, one whose turn denies itself (its end, its usage) as both; a file
that cannot be used at all raises. Knows nothing of shards or models, and what its logprobs are of it takes
from a `Statement`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from rlbatch.assemble import to_samples
from rlbatch.catalogue import CATALOGUE, finding
from rlbatch.engines.output import to_turn
from rlbatch.errors import Finding, RecordError, ReplyError, Where
from rlbatch.records import Provenance, Sample, Trajectory, Turn
from rlbatch.soundness import check_sound_trajectory
from rlbatch.storage.documents import WANTED, Document, Place, documents, unusable
from rlbatch.storage.recorded_exchange import (
    provenance_of_exchange,
    refused_request,
    turns_of_exchange,
)
from rlbatch.storage.recorded_row import RecordedRow, output_of
from rlbatch.storage.recorded_sampling import OWN_STOPS, sampling_of_recording
from rlbatch.storage.statements import (
    FlagUse,
    ModelIdentity,
    Statement,
    provenance_of,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One entry of a file: a sample and what its turn shows, or the findings that say why it is none."""

    index: int
    """Its place in the file, counting every entry."""
    sample: Sample | None
    findings: tuple[Finding, ...] = ()
    share: float
    """How much of the file is read by now, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entry:
    """What an entry of a document became."""

    outcome: Turn | ReplyError
    done: float
    """The share of its document read by then, 0 to 1."""
    end_known: bool = True
    """It says what ended it."""
    row: RecordedRow = field(default_factory=RecordedRow)
    """The row that it is; says nothing where it is of a reply."""


def read_recording(
    path: Path,
    statement: Statement,
    *,
    identity: ModelIdentity | None = None,
    skip_refused: bool = False,
) -> Iterator[Row]:
    """Every entry of a recorded .json or .jsonl file, in order.

    Args:
        path: the file.
        statement: what the file cannot say of its logprobs. Lines of .jsonl may each say how they were
            sampled: it speaks for those that do not, and must be needed by some line or denied by none.
        identity: the model that sampled, for the samples' provenance.
        skip_refused: a request that the engine refused is an entry without a sample, told as a warning,
            instead of an error.

    Raises:
        StorageError: file-unusable: missing, empty, too large, not JSON (naming the line), or no recording.
        ReplyError: an entry without ids or logprobs, an error body, an unsupported route; provenance-missing,
            statement-contradicted. What was yielded before stands.

    Example:
        {"sampling": {"temperature": 0.7}, "rows": [{"prompt_ids": [1], "ids": [5, 2], "lp": [-1.5, -0.25],
        "finish_reason": "stop"}]} -> one row, sample token_ids [1, 5, 2], trained at 1:3
    """
    index = num_refused = 0
    use = FlagUse() if path.suffix == ".jsonl" else None
    for place, document in documents(path):
        refused = None if document.rows is not None else refused_request(document)
        if refused is not None:
            yield _refused(refused, place, index, skip=skip_refused)
            num_refused += 1
            index += 1
            continue
        groups: dict[bytes, str] = {}
        if use is not None:
            use.line = place.line or 0
        entries = _entries(document, place, index, statement, identity, use)
        for number, entry in enumerate(entries):
            where = _place_of(entry.row, place, index, number)
            share = place.share(entry.done)
            if isinstance(entry.outcome, ReplyError):
                yield Row(index=index, sample=None, findings=_row_findings(entry.outcome, where), share=share)
            else:
                # Entries of one prompt are a group: the first one's number names it.
                prompt = entry.outcome.prompt_token_ids.tobytes()
                group = groups.setdefault(prompt, f"{place.name}@{number}")
                trajectory = _trajectory(entry.outcome, entry.row, where, group)
                yield Row(
                    index=index,
                    sample=_sample(trajectory, where, end_known=entry.end_known),
                    findings=_turn_findings(trajectory, where, end_known=entry.end_known),
                    share=share,
                )
            index += 1
    if index == num_refused:
        found = f"{num_refused} requests, all refused by the engine" if num_refused else "none"
        raise unusable(path, "at least one rollout", found)
    if use is not None:
        use.require_meant()


def _refused(found: Finding, place: Place, index: int, *, skip: bool) -> Row:
    """The entry of a request that the engine refused.

    Raises:
        ReplyError: reply-error-body, unless such entries are to be skipped.
    """
    line = "" if place.line is None else f"line {place.line}: "
    told = replace(found, where=place.entry(index, 0), found=line + found.found)
    if not skip:
        raise ReplyError.of(
            replace(told, fix=f"{told.fix}; --skip-refused leaves such entries out and counts them")
        )
    return Row(
        index=index, sample=None, findings=(replace(told, severity="warning"),), share=place.share_after
    )


def _row_findings(error: ReplyError, where: Where) -> tuple[Finding, ...]:
    """The findings of an entry that is no sample; an error where the fault is not of that entry alone."""
    located = _located(error, where)
    if any(CATALOGUE[found.code].level == "reply" for found in located.findings):
        raise located
    return located.findings


_OF_THE_END = ("finish-mismatch", "stop-overrun")
"""What a turn shows by what the engine says that ended it."""


def _place_of(row: RecordedRow, place: Place, index: int, number: int) -> Where:
    where = place.entry(index, number)
    return where if row.trajectory_id is None else replace(where, trajectory=row.trajectory_id)


def _trajectory(turn: Turn, row: RecordedRow, where: Where, group: str) -> Trajectory:
    """The entry's one turn with what its row says of the rollout; `group` where it names none."""
    try:
        return Trajectory(
            trajectory_id=str(where.trajectory),
            turns=(turn,),
            group_id=group if row.group_id is None else row.group_id,
            reward=row.reward,
            advantage=row.advantage,
        )
    except RecordError as error:
        raise ReplyError.of(_malformed(str(error), where)) from None


def _turn_findings(trajectory: Trajectory, where: Where, *, end_known: bool) -> tuple[Finding, ...]:
    """What the entry's turn shows by itself, at its place in the file."""
    return tuple(
        replace(
            found,
            where=replace(where, turn=found.where.turn, start=found.where.start, stop=found.where.stop),
        )
        for found in check_sound_trajectory(trajectory)
        if end_known or found.code not in _OF_THE_END
    )


def _sample(trajectory: Trajectory, where: Where, *, end_known: bool) -> Sample:
    try:
        (sample,) = to_samples(trajectory)
    except RecordError as error:
        raise ReplyError.of(_malformed(str(error), where)) from None
    # Without stop reasons no turn's end is held against its finish reason.
    return sample if end_known else replace(sample, stop_reasons=())


def _entries(
    document: Document,
    place: Place,
    first: int,
    statement: Statement,
    identity: ModelIdentity | None,
    use: FlagUse | None,
) -> Iterator[_Entry]:
    """Each entry of a document: its turn, or why it has none."""
    try:
        if document.rows is not None:
            said = {} if document.sampling is None else sampling_of_recording(document.sampling, place.where)
            provenance = provenance_of(said, statement, identity=identity, where=place.where, use=use)
            own_stops = any((document.sampling or {}).get(name) for name in OWN_STOPS)
            yield from _recorded_rows(document.rows, place, first, provenance, own_stops=own_stops)
        else:
            how = provenance_of_exchange(document, statement, identity=identity, where=place.where, use=use)
            yield from _reply(document, how)
    except ReplyError as error:
        raise _located(error, place.where, line=place.line) from None


def _recorded_rows(
    rows: list[RecordedRow], place: Place, first: int, provenance: Provenance, *, own_stops: bool
) -> Iterator[_Entry]:
    """The turn of each row; with stops of the request's own, a row must say which of them ended it."""
    for number, row in enumerate(rows):
        where = _place_of(row, place, first + number, number)
        try:
            turn: Turn | ReplyError = to_turn(output_of(row, f"row {number}", where), provenance)
        except ReplyError as error:
            turn = _located(error, where)
        silent = row.finish_reason == "stop" and row.stop_reason is msgspec.UNSET
        done = (number + 1) / len(rows)
        yield _Entry(outcome=turn, done=done, end_known=not (own_stops and silent), row=row)


def _reply(document: Document, provenance: Provenance) -> Iterator[_Entry]:
    """The choices of a recorded reply; a reply with a fault is one entry."""
    try:
        turns = turns_of_exchange(document, provenance)
    except ReplyError as error:
        yield _Entry(outcome=error, done=1.0)
        return
    for number, turn in enumerate(turns):
        yield _Entry(outcome=turn, done=(number + 1) / len(turns))


def _located(error: ReplyError, where: Where, *, line: int | None = None) -> ReplyError:
    """The same findings with the file, and the entry where they name none."""
    place = f"line {line}: " if line is not None else ""
    return ReplyError.of(
        *(
            found
            if found.where.sample is not None
            else replace(found, where=where, found=place + found.found)
            for found in error.findings
        )
    )


def _malformed(complaint: str, where: Where) -> Finding:
    return finding("reply-malformed", where=where, expected=WANTED, found=complaint)
