"""`as_dict` and `from_dict`: the two public functions over all dialects."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from rlbatch.batch import Batch
from rlbatch.collate import Padding, collate, unpack
from rlbatch.dialects import reading
from rlbatch.dialects.dialect import Dialect
from rlbatch.dialects.prime_rl import PRIME_RL
from rlbatch.dialects.tinker import TINKER
from rlbatch.dialects.trl import TRL
from rlbatch.dialects.verl import VERL
from rlbatch.errors import RecordError
from rlbatch.records import Origin
from rlbatch.records.structure import check_choice

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (TRL, VERL, PRIME_RL, TINKER)}


def as_dict(batch: Batch, dialect: str, *, drop: Collection[str] = ()) -> dict[str, Any]:
    """The batch as a trainer takes it: its names, shapes, padding and fillers.

    Args:
        batch: padded or packed, on any device; tensors of the result are on the same.
        dialect: `trl`, `verl`, `prime_rl` or `tinker`; the module of each says which keys there are.
        drop: fields that may be left out, because the trainer has them from elsewhere or has no use for them.

    Raises:
        RecordError: no such dialect; a field that says something at trained tokens would be lost and `drop`
            does not name it; a field is there for some samples and not for one with trained tokens;
            several values a row where there is room for one; a trained value not finite; a name in
            `drop` that is no field.

    Example:
        as_dict(batch, "trl", drop=["temperature", "policy_version"])["completion_ids"]
    """
    form = _named(dialect)
    dropped = _names(drop, f"as_dict({dialect!r})")
    samples = unpack(batch)
    form.require_carried(samples, dropped)
    made = form.encode(samples, dropped)
    if form.count_key is not None:
        count = batch.num_loss_tokens if batch.step is None else batch.step.num_loss_tokens
        made[form.count_key] = torch.tensor(count)
    device = batch.input_ids.device
    moved: dict[str, Any] = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), made)
    return moved


def from_dict(form: Mapping[str, Any], dialect: str, *, like: Batch, drop: Collection[str] = ()) -> Batch:
    """A trainer's dict as a batch again: what it carries from there, everything else as in `like`.

    Logprobs, advantages and temperatures are taken at trained tokens; elsewhere the dict holds fillers. A
    token that the dict trains and `like` did not keeps its value of `like` where the dict has a filler.
    Values of bfloat16 or float16 are taken as they are, and stay that coarse: 0.02 nats at -5 in bfloat16.

    Args:
        form: what `as_dict` made, perhaps with values that the trainer changed or added.
        dialect: whose it is.
        like: the batch that `as_dict` was given; the result has its layout, padding, purpose, step, device.
        drop: keys of the dict that the batch has no place for, and that may be lost.

    Raises:
        RecordError: no such dialect; a key is missing, or one is there that the dialect does not have and
            `drop` does not name; rows, lengths or shapes are not those of `like`; ids
            that are no integers, masks of anything but 0 and 1, values that float32 does not hold; what the
            dict says twice and differently; a newly trained token for which dict and `like` have no value.

    Example:
        from_dict(as_dict(batch, "verl"), "verl", like=batch) says what `batch` says
    """
    how, samples = _named(dialect), unpack(like)
    reading.mapping(form, f"the form of {dialect}")
    known = {*how.keys, *_names(drop, f"from_dict({dialect!r})")}
    lost = [key for key in form if key not in known]
    if lost:
        raise RecordError(
            f"from_dict({dialect!r}): expected keys of {', '.join(how.keys)}, found {lost[0]!r}"
            + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
            + f", which would be lost. If that is meant, say drop=({lost[0]!r},)"
        )
    try:
        changes = how.decode(form, samples)
    except KeyError as error:
        raise RecordError(f"from_dict({dialect!r}): expected a key {error}, found {sorted(form)}") from error
    changed = [replace(sample, **change) for sample, change in zip(samples, changes, strict=True)]
    origins = [Origin(path=ref.path, index=ref.index) for ref in like.refs]
    # Without its purpose: under `audit` raw values would be put over those of the dict once more.
    made = collate(changed, layout=like.layout, origins=origins, padding=_padding_of(like))
    if how.count_key is not None and how.count_key in form:
        _check_count(form, how.count_key, made, like)
    return replace(made, purpose=like.purpose, step=like.step).to(like.input_ids.device)


def _check_count(form: Mapping[str, Any], key: str, made: Batch, like: Batch) -> None:
    """The count of trained tokens against the mask; of a step with other batches in it, that it is enough."""
    count = int(reading.tensor(form, key, (), "ids"))
    if count < made.num_loss_tokens or (like.step is None and count != made.num_loss_tokens):
        expected = f"at least {made.num_loss_tokens}" if like.step else f"{made.num_loss_tokens}"
        raise RecordError(f"from_dict: expected {key} of {expected}, as the mask has it, found {count}")


def _padding_of(batch: Batch) -> Padding:
    """Padding that lays sequences of the same lengths out as the batch has them."""
    width = batch.shape[1]
    starts = [ref.token_offset for ref in batch.refs]
    multiple = 1
    is_token = np.zeros(batch.shape, np.bool_)
    for sequence, (start, length) in enumerate(zip(starts, batch.sequence_num_tokens, strict=True)):
        is_token[sequence if batch.layout == "padded" else 0, start : start + length] = True
    if batch.cu_seqlens is not None:
        # Each sequence with its own padding is a multiple of what was asked for, and so is the row.
        ends = batch.cu_seqlens[: len(starts) + 1]
        multiple = int(np.gcd.reduce([*ends.diff().tolist(), width]))
    unused = batch.input_ids.cpu().numpy()[~is_token]
    return Padding(
        token_id=int(unused[0]) if len(unused) else 0,
        side="left" if batch.layout == "padded" and any(starts) else "right",
        sequence_multiple=multiple,
        row_multiple=width,
    )


def _names(drop: Collection[str], label: str) -> frozenset[str]:
    if isinstance(drop, str):
        raise RecordError(f"{label}: drop: expected several names, found the text {drop!r}; say ({drop!r},)")
    return frozenset(drop)


def _named(dialect: str) -> Dialect:
    check_choice("dialect", dialect, tuple(DIALECTS))
    return DIALECTS[dialect]
