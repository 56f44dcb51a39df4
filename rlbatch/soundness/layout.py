"""`check_sound_layout`: whether a packed or padded batch, as anyone's trainer makes it, is what it must be.

Boundaries, positions, masks, lengths and the normaliser say some things twice; here they are held against
each other. Numpy; knows no sample and no model.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, RecordError, SoundnessError, Where
from rlbatch.records import LayoutArrays
from rlbatch.records.structure import kind_of
from rlbatch.soundness.sequences import Sequences, sequences_of


def check_sound_layout(
    arrays: LayoutArrays, *, context_parallel: int = 1, tensor_parallel: int = 1
) -> tuple[Finding, ...]:
    """What can be known of a batch's layout from its arrays alone; no fault of theirs raises.

    In findings `sample` is the row, or the sequence of a pack, and tokens are counted within it.

    Args:
        arrays: the batch.
        context_parallel: ranks that share a sequence in zigzag: each takes two pieces of equal length.
        tensor_parallel: ranks that share a sequence's positions where sequence parallelism is on.

    Raises:
        RecordError: no LayoutArrays, or a size below 1.

    Example:
        cu_seqlens [0, 4, 7], loss_mask [1, 1, 1, 1, 0, 1, 0], align target: boundary-target, sample 0,
        token 3: what it predicts is of the next sequence
    """
    if not isinstance(arrays, LayoutArrays):
        raise RecordError(f"arrays: expected LayoutArrays, found {kind_of(arrays)}")
    for name, size in (("context_parallel", context_parallel), ("tensor_parallel", tensor_parallel)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise RecordError(f"{name}: expected an int >= 1, found {size!r}")
    broken = tuple(_boundary_invalid(arrays))
    if broken:
        # Without boundaries nothing else means anything.
        return broken
    multiple = tensor_parallel * (2 * context_parallel if context_parallel > 1 else 1)
    sequences = sequences_of(arrays, multiple)
    return tuple(found for check in LAYOUT_CHECKS for found in check(sequences))


def require_sound_layout(
    arrays: LayoutArrays, *, context_parallel: int = 1, tensor_parallel: int = 1
) -> LayoutArrays:
    """The same arrays, or an error that names every fault in them; the arguments of `check_sound_layout`.

    Raises:
        SoundnessError: a finding of severity error; warnings pass.
        RecordError: no LayoutArrays, or a size below 1.
    """
    findings = check_sound_layout(arrays, context_parallel=context_parallel, tensor_parallel=tensor_parallel)
    errors = [found for found in findings if found.severity == "error"]
    if errors:
        raise SoundnessError.of(*errors)
    return arrays


def _boundary_invalid(arrays: LayoutArrays) -> Iterator[Finding]:
    """cu_seqlens that are no boundaries of this row, and a max_seqlen that is not theirs."""
    cu_seqlens = arrays.cu_seqlens
    if cu_seqlens is None:
        return
    bounds = cu_seqlens.astype(np.int64)
    lengths = np.diff(bounds)
    num_positions = arrays.input_ids.shape[1]
    if bounds[0] != 0 or bounds[-1] != num_positions:
        yield finding(
            "boundary-invalid",
            expected=f"cu_seqlens from 0 to {num_positions}, the positions there are",
            found=f"from {bounds[0]} to {bounds[-1]}",
        )
    if (lengths <= 0).any():
        at = int(np.argmax(lengths <= 0))
        yield finding(
            "boundary-invalid",
            where=Where(sample=at),
            expected="cu_seqlens that rise: no sequence without a token",
            found=f"{bounds[at + 1]} after {bounds[at]}",
            likely="an empty sequence was packed, or lengths stand in place of their running sum",
        )
    elif arrays.max_seqlen is not None and arrays.max_seqlen != lengths.max():
        yield finding(
            "boundary-invalid",
            where=Where(sample=int(lengths.argmax())),
            expected=f"max_seqlen {lengths.max()}, the longest sequence",
            found=f"{arrays.max_seqlen}",
            likely="max_seqlen is of another batch, or counts the pack as one sequence",
        )


def _positions(sequences: Sequences) -> Iterator[Finding]:
    """Positions that do not begin at 0 with each sequence, or begin anew inside one."""
    position_ids = sequences.arrays.position_ids
    if position_ids is None:
        return
    flat = position_ids.reshape(-1).astype(np.int64)
    packed = sequences.arrays.cu_seqlens is not None
    width = sequences.arrays.input_ids.shape[1]
    first = flat[sequences.start]
    for at in np.flatnonzero(first).tolist():
        padding = int(sequences.start[at]) % width
        yield finding(
            "positions-not-restarted" if packed else "positions-count-padding",
            where=Where(sample=at, start=0, stop=1),
            expected="position 0 at the first token of every sequence",
            found=f"position {first[at]}" + ("" if packed else f" after {padding} positions of padding"),
        )
    yield from _not_counted_on(sequences, flat)


def _not_counted_on(sequences: Sequences, flat: NDArray[np.int64]) -> Iterator[Finding]:
    """Positions that begin anew inside a sequence; padding behind it may, as nothing of it is trained."""
    steps = np.flatnonzero(np.diff(flat) != 1) + 1
    owner = np.searchsorted(sequences.start, steps, "right") - 1
    inside = (owner >= 0) & (steps > sequences.start[owner]) & (steps < sequences.stop[owner])
    told: set[int] = set()
    for step, at in zip(steps[inside].tolist(), owner[inside].tolist(), strict=True):
        if at in told or not sequences.trained[step : sequences.stop[at]].any():
            continue
        told.add(at)
        token = step - int(sequences.start[at])
        yield finding(
            "boundary-invalid",
            where=Where(sample=at, start=token, stop=token + 1),
            expected="positions that count on to the end of the sequence",
            found=f"position {flat[step]} after {flat[step - 1]}",
            likely="two sequences lie between two boundaries, or padding lies inside a sequence",
        )


def _boundary_slots(sequences: Sequences) -> Iterator[Finding]:
    """Trained positions at the edge of a sequence, where nothing of it predicts or is predicted."""
    target = sequences.arrays.align == "target"
    edge = sequences.stop - 1 if target else sequences.start
    for at in np.flatnonzero(sequences.trained[edge]).tolist():
        token = int(edge[at] - sequences.start[at])
        where = Where(sample=at, start=token, stop=token + 1)
        if target:
            yield finding(
                "boundary-target",
                where=where,
                expected="the last slot of a sequence has no target and is not trained",
                found=f"token {token}, the last, is trained to predict what is not of its sequence",
            )
        else:
            yield finding(
                "boundary-trained",
                where=where,
                expected="the first token of a sequence is not trained: nothing of it comes before",
                found="token 0 is trained",
            )


def _padding_too_short(sequences: Sequences) -> Iterator[Finding]:
    """Sequences that the parallel ranks cannot share evenly."""
    for at in np.flatnonzero(sequences.room % sequences.multiple).tolist():
        yield finding(
            "padding-too-short",
            where=Where(sample=at),
            expected=f"a multiple of {sequences.multiple} positions, so that every rank gets its pieces",
            found=f"{sequences.room[at]} positions",
        )


def _length_field(sequences: Sequences) -> Iterator[Finding]:
    """Length fields that do not count the trained tokens."""
    said = sequences.arrays.sequence_num_loss_tokens
    if said is None:
        return
    counted = sequences.counts()
    # Pieces of padding behind the sequences are entries of cu_seqlens, and no field speaks of them.
    if len(said) > len(counted) or counted[len(said) :].any():
        yield finding(
            "length-field-mismatch",
            expected=f"one length for each of {len(counted)} sequences",
            found=f"{len(said)}",
        )
        return
    for at in np.flatnonzero(said.astype(np.int64) != counted[: len(said)]).tolist():
        trained = np.flatnonzero(sequences.trained[sequences.start[at] : sequences.stop[at]])
        span = int(trained[-1] - trained[0]) + 1 if len(trained) else 0
        kind = ", the span from the first to the last of them" if said[at] == span else ""
        yield finding(
            "length-field-mismatch",
            where=Where(sample=at),
            expected=f"{counted[at]}, the trained tokens",
            found=f"{said[at]}{kind}",
        )


def _normalizer(sequences: Sequences) -> Iterator[Finding]:
    """A token mean over another number than that of the step's trained tokens."""
    said, step = sequences.arrays.normalizer, sequences.arrays.step_num_loss_tokens
    counted = int(sequences.trained.sum())
    if step is not None and step < counted:
        yield finding(
            "normalizer-mismatch",
            expected=f"a step of at least the {counted} trained tokens that this batch alone has",
            found=f"step_num_loss_tokens {step}",
            likely="the step's total is of another step, or lacks micro-batches or ranks",
        )
        return
    if said is None or said == (counted if step is None else step):
        return
    mask = sequences.arrays.attention_mask
    others = {
        "the trained tokens of this micro-batch alone": counted,
        "the number of all positions, padding too": sequences.arrays.input_ids.size,
        "the number of all tokens, prompts too": int((sequences.stop - sequences.start).sum()),
        "the number of the sequences": len(sequences.start),
        "the number of what attention sees": sequences.arrays.input_ids.size
        if mask is None
        else int(mask.sum()),
    }
    kind = next((f", {name}" for name, count in others.items() if count == said), "")
    likely = None
    if step is None and said > counted and not kind:
        likely = "the batch is a part of a step, whose total was not given; or a total of other data"
    yield finding(
        "normalizer-mismatch",
        expected=f"{counted}, the trained tokens"
        if step is None
        else f"{step}, the trained tokens of the step",
        found=f"{said:g}{kind}",
        likely=likely,
    )


def _logprobs(sequences: Sequences) -> Iterator[Finding]:
    """Another number of logprobs than positions."""
    values = sequences.arrays.inference_logprobs
    size = sequences.arrays.input_ids.size
    if values is None or len(values) == size:
        return
    difference = len(values) - size
    num_sequences = len(sequences.start)
    kinds = {
        -num_sequences: "as many are missing as there are sequences: one at the start or end of each",
        num_sequences: "one too many for each sequence",
        int((sequences.stop - sequences.start).sum()) - size: "as many as there are positions of padding",
    }
    kind = kinds.get(difference)
    yield finding(
        "length-mismatch",
        expected=f"{size} logprobs, one a position",
        found=f"{len(values)}, a difference of {difference:+d}" + (f"; {kind}" if kind else ""),
        likely="logprobs of predictions were cut or joined sequence by sequence, one entry off each"
        if abs(difference) == num_sequences
        else None,
        fix="keep one logprob a token, with NaN where nothing predicts it, and shift once, at collation",
    )


LAYOUT_CHECKS: tuple[Callable[[Sequences], Iterator[Finding]], ...] = (
    _logprobs,
    _positions,
    _boundary_slots,
    _padding_too_short,
    _length_field,
    _normalizer,
)
"""Every check on a layout whose boundaries are sound."""
