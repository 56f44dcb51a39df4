"""Checks on the tokens that begin and end things: BOS, EOS, and what an engine does after one."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Where
from rlbatch.records import Provenance, StopReason
from rlbatch.soundness.subject import Subject

_UNKNOWN = -1
"""No id."""

ENGINES_THAT_SAY_WHY = ("vllm", "sglang")
"""Their stop reason is empty only where the main EOS ended the turn."""


def bos_wrong(subject: Subject) -> Iterator[Finding]:
    """Prompts that begin with two BOS, or with none, where the provenance says that they begin with one."""
    bos = _bos_of_samples(subject)
    if (bos == _UNKNOWN).all():
        return
    ids, first = subject.token_ids, subject.offsets[:-1]
    second = np.minimum(first + 1, subject.offsets[1:] - 1)
    known = bos != _UNKNOWN
    missing = known & (ids[first] != bos)
    doubled = known & ~missing & (second > first) & (ids[second] == bos)
    for sample in np.flatnonzero(missing).tolist():
        yield finding(
            "bos-missing",
            where=subject.where(sample, np.zeros(1, np.intp)),
            expected=f"a prompt that begins with BOS, id {bos[sample]}",
            found=f"id {ids[first[sample]]} at token 0",
        )
    for sample in np.flatnonzero(doubled).tolist():
        prompt = subject.samples[sample].token_ids
        count = int(np.argmax(prompt != bos[sample])) or len(prompt)
        yield finding(
            "bos-doubled",
            where=subject.where(sample, np.arange(count)),
            expected=f"BOS, id {bos[sample]}, once",
            found=f"{count} times at the start",
        )


def mask_drops_eos(subject: Subject) -> Iterator[Finding]:
    """Sampled stop tokens that are not trained though the token before each is."""
    untrained = np.flatnonzero(subject.sampled > subject.loss_mask)
    # Token 0 of a sample is never sampled, so that there is always one before.
    single = untrained[subject.sampled[untrained - 1] & subject.loss_mask[untrained - 1]]
    if len(single):
        single = single[~subject.begins_run(single)]
    for run, tokens in subject.by_run(single):
        ids = subject.token_ids[subject.tokens_of(run)]
        dropped = tokens[np.isin(ids[tokens], subject.provenance_of(run).eos_token_ids)]
        if len(dropped):
            yield finding(
                "mask-drops-eos",
                where=subject.where_run(run, dropped),
                expected="a sampled stop token to be trained like the tokens before it",
                found=f"stop id {ids[dropped[0]]} at token {subject.first_token(run) + dropped[0]} "
                "is not trained",
            )


def stop_overrun(subject: Subject) -> Iterator[Finding]:
    """Turns that say they ended at a stop token and have one in their middle."""
    stopped = _stopped(subject)
    if not stopped.any():
        return
    runs = subject.runs
    for run, tokens in subject.by_run(_stop_tokens(subject)):
        last = int(runs.stop[run] - runs.start[run]) - 1
        if not stopped[run] or tokens[0] == last:
            continue
        sample, turn = subject.samples[int(runs.sample[run])], int(runs.turn[run])
        ids, how = subject.token_ids[subject.tokens_of(run)], subject.provenance_of(run)
        kept = sample.stop_reasons[turn : turn + 1]
        # Under ignore_eos a stop string may have ended it, and then the last token is no stop token.
        sure = tokens[-1] == last or any(
            passed_stop(ids, reason, how) is not None and says_why(reason, how) for reason in kept
        )
        where = subject.where_run(run, np.array([tokens[0] + 1, last]))
        yield overrun(ids, int(tokens[0]), subject.first_token(run), where, sure=sure)


def overrun(ids: NDArray[np.int32], at: int, first: int, where: Where, *, sure: bool) -> Finding:
    """That ids [C] of a turn, whose first token is `first`, go on after the stop token `at` among them."""
    rest = ids[at + 1 :]
    filled = len(rest) > 1 and bool((rest == rest[0]).all())
    return finding(
        "stop-overrun",
        severity="error" if sure else "warning",
        where=where,
        expected="nothing after the first stop token of a turn that ended with `stop`",
        found=f"{len(rest)} tokens after the stop token at {first + at}"
        + (f", each of them id {rest[0]}" if filled else ""),
        likely="padding behind the end, as `generate` returns it in a batch, was kept as if sampled"
        if filled
        else None,
        fix="cut ids and logprobs of each completion after its first stop token" if filled else None,
    )


def finish_mismatch(subject: Subject) -> Iterator[Finding]:
    """Trained turns that say they ended at a stop token and do not end with it."""
    runs = subject.runs
    last = subject.token_ids[runs.stop - 1]
    # Most turns end with an EOS, and nothing else is said of why.
    silent = [len(sample.stop_reasons) == sample.stop_reasons.count(None) for sample in subject.samples]
    as_usual = _ended_by_eos(subject, last) & np.array(silent)[runs.sample]
    for run in subject.trained_runs(_are_ends(subject) & ~as_usual):
        sample, turn = subject.samples[int(runs.sample[run])], int(runs.turn[run])
        if sample.finish_reasons[turn : turn + 1] != ("stop",):
            continue
        (reason,) = sample.stop_reasons[turn : turn + 1] or (None,)
        ids, how = subject.token_ids[subject.tokens_of(run)], subject.provenance_of(run)
        if passed_stop(ids, reason, how) is not None:
            # `stop_overrun` tells it: no stop token was lost.
            continue
        where = subject.where_run(run, runs.stop[run : run + 1] - runs.start[run] - 1)
        yield from lost_stop(int(last[run]), reason, how, where)


def passed_stop(ids: NDArray[np.int32], stop_reason: StopReason | None, how: Provenance) -> int | None:
    """The first place in a turn's ids [C] of the EOS that ended it, if the last is none such; else None.

    Example:
        [7, 2, 0, 0], EOS 2, no stop reason -> 1; [7, 2] -> None; [7, 0] -> None
    """
    if isinstance(stop_reason, str):
        return None
    ended = [each for each in how.eos_token_ids if stop_reason in (None, each)]
    places = np.flatnonzero(np.isin(ids, ended))
    return int(places[0]) if len(places) and places[-1] != len(ids) - 1 else None


def says_why(stop_reason: StopReason | None, how: Provenance) -> bool:
    """Whether it is known what ended the turn: engines that leave it out for stop strings too do not say."""
    return stop_reason is not None or how.engine.casefold() in ENGINES_THAT_SAY_WHY


def lost_stop(
    last: int | None, stop_reason: StopReason | None, how: Provenance, where: Where
) -> Iterator[Finding]:
    """What is wrong with a turn whose finish reason is `stop`, and whose stop token stands nowhere.

    Args:
        last: its last sampled id; None where there is none.
        stop_reason: what the engine said of it.
        how: says which ids end a turn.
        where: its last token, for the finding.
    """
    if isinstance(stop_reason, str):
        return
    wanted = how.eos_token_ids if stop_reason is None else (stop_reason,)
    if not wanted or last in wanted:
        return
    yield finding(
        "finish-mismatch",
        severity="error" if says_why(stop_reason, how) else "warning",
        where=where,
        expected=f"a turn that ended with `stop` to end with stop token {' or '.join(map(str, wanted))}",
        found="no token" if last is None else f"id {last}",
    )


def _are_ends(subject: Subject) -> NDArray[np.bool_]:
    """[G]; True = the run is the last one of its turn, and what stopped the turn was kept."""
    runs = subject.runs
    ends = np.array([bool(sample.stop_reasons) for sample in subject.samples])[runs.sample]
    ends[:-1] &= (runs.sample[:-1] != runs.sample[1:]) | (runs.turn[:-1] != runs.turn[1:])
    return ends


def _ended_by_eos(subject: Subject, last: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[G]; True = the last id of the run is an EOS of its own provenance, or nobody says which those are."""
    ended = np.zeros(len(last), np.bool_)
    for index, each in enumerate(subject.provenances):
        own = subject.runs.provenance == index
        ended[own] = np.isin(last[own], each.eos_token_ids) if each.eos_token_ids else True
    return ended


def _bos_of_samples(subject: Subject) -> NDArray[np.int64]:
    """[S] by the provenance of each sample's first turn; `_UNKNOWN` where nobody says."""
    stated = subject.per_run(
        lambda provenance: _UNKNOWN if provenance.bos_token_id is None else provenance.bos_token_id, "int64"
    )
    bos = np.full(len(subject.samples), _UNKNOWN, np.int64)
    # Written from the last turn to the first, so that the first stays.
    bos[subject.runs.sample[::-1]] = stated[::-1]
    return bos


def _stop_tokens(subject: Subject) -> NDArray[np.intp]:
    """Sampled tokens that are stop tokens by the provenance of their run, in order."""
    ids = subject.token_ids
    wanted = sorted({token_id for each in subject.provenances for token_id in each.eos_token_ids})
    hits = np.zeros(len(ids), np.bool_)
    for token_id in wanted:
        hits |= ids == token_id
    at = np.flatnonzero(hits & subject.sampled)
    if len(subject.provenances) == 1:
        return at
    owner = subject.runs.provenance[np.searchsorted(subject.runs.start, at, "right") - 1]
    known = [np.array(each.eos_token_ids) for each in subject.provenances]
    own = [bool((known[index] == ids[token]).any()) for index, token in zip(owner, at, strict=True)]
    return at[np.array(own, np.bool_)]


def _stopped(subject: Subject) -> NDArray[np.bool_]:
    """[G]; True = the engine said that the turn ended with `stop`, and which ids stop is known."""
    has_ids = subject.per_run(lambda provenance: bool(provenance.eos_token_ids), "bool")
    said = np.zeros(len(subject.runs), np.bool_)
    for run in np.flatnonzero(has_ids).tolist():
        reasons = subject.samples[int(subject.runs.sample[run])].finish_reasons
        turn = int(subject.runs.turn[run])
        said[run] = turn < len(reasons) and reasons[turn] == "stop"
    return said
