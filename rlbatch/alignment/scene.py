"""`Scene`: one batch on the host, copied once and only where something in it is worth a look.

Makes the `Evidence` of its segments. Decides nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.alignment.evidence import Context, Evidence, Rows
from rlbatch.alignment.limits import PEERS_MIN, PEERS_MIN_TOKENS
from rlbatch.alignment.logits import LogitsFor, ask
from rlbatch.alignment.measure import COLUMN, Measured
from rlbatch.batch import Batch, SampleRef
from rlbatch.errors import Where
from rlbatch.records import Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """The values of one batch, [B, T] each, and what is usual among its segments."""

    batch: Batch
    number: int | None
    """Which micro-batch of its step it is; None where it is the only one."""
    trainer: NDArray[np.float64]
    inference: NDArray[np.float64]
    loss_mask: NDArray[np.bool_]
    versions: NDArray[np.int64]
    temperature: NDArray[np.float64]
    input_ids: NDArray[np.int64]
    lengths: tuple[int, ...]
    """[S] of the sequences."""
    prompt_lengths: tuple[int, ...]
    """[S] tokens of each before its first sampled one; 0 where nothing of it was sampled."""
    floor: float | None
    """Usual mean |log_ratio| of a segment, nats."""
    logits_for: LogitsFor | None

    @classmethod
    def of(cls, measured: Measured, floor: float | None, logits_for: LogitsFor | None) -> "Scene":
        """Copy what the diagnosis needs; waits for the device."""
        batch = measured.batch
        return cls(
            batch=batch,
            number=measured.number,
            trainer=measured.trainer_logprobs.double().cpu().numpy(),
            inference=batch.inference_logprobs.double().cpu().numpy(),
            loss_mask=batch.loss_mask.cpu().numpy(),
            versions=batch.policy_version.long().cpu().numpy(),
            temperature=batch.temperature.double().cpu().numpy(),
            input_ids=batch.input_ids.cpu().numpy(),
            lengths=_lengths(batch),
            prompt_lengths=_prompt_lengths(batch),
            floor=floor,
            logits_for=logits_for,
        )

    def evidence(self, index: int, rows: Callable[[], Rows], *, comparable: bool, current: bool) -> Evidence:
        """What there is on one segment."""
        segment = self.batch.host_segments[index]
        here = (segment.row, slice(segment.start, segment.stop))
        place = place_of(self.batch, index, self.number)
        asking, provenance = None, self.batch.provenances[index]
        # What is predicted from logits is predicted over the whole softmax, which these values are not of.
        if self.logits_for is not None and not provenance.renormalised(self.batch.purpose):
            asking = partial(self._ask, self.logits_for, index, place)
        return Evidence(
            trainer=self.trainer[here],
            inference=self.inference[here],
            trained=self.loss_mask[here],
            versions=self.versions[here],
            divisor=float(self.temperature[segment.row, segment.start]),
            provenance=provenance,
            comparable=comparable,
            current=current,
            place=place,
            context=self._context(segment),
            floor=self.floor,
            rows=rows,
            ask=asking,
        )

    def _ask(self, logits_for: LogitsFor, index: int, place: Where, start: int, stop: int) -> Tensor:
        first = self.batch.host_segments[index].start
        return ask(logits_for, self.batch, index, first + start, first + stop, place=place)

    def _context(self, segment: Segment) -> Context:
        ref = self.batch.ref_of(segment)
        index = self.batch.sequence_of(segment)
        _, stop = self.batch.tokens_of(segment)
        return Context(
            ids=self.input_ids[segment.row, ref.token_offset : ref.token_offset + stop],
            prompt_length=self.prompt_lengths[index],
            padding=max(self.lengths) - self.lengths[index],
            index=index,
            is_packed=self.batch.layout == "packed",
        )


def usual_mean(table: NDArray[np.float64], kept: NDArray[np.bool_]) -> float | None:
    """Median over segments of their mean |log_ratio|, nats; None where too few say anything.

    Args:
        table: [G, stats].
        kept: [G] segments that are asked.
    """
    count = table[:, COLUMN["num_compared"]]
    heard = kept & (count >= PEERS_MIN_TOKENS)
    if heard.sum() < PEERS_MIN:
        return None
    means = np.sort(table[heard, COLUMN["sum_abs_log_ratio"]] / count[heard])
    # np.median takes longer than all else that is done to a small batch.
    return float(means[(len(means) - 1) // 2] + means[len(means) // 2]) / 2


def place_of(batch: Batch, index: int, number: int | None) -> Where:
    """Where a segment is, in its sample's own tokens, and which micro-batch of its step that is in."""
    segment = batch.host_segments[index]
    ref: SampleRef = batch.ref_of(segment)
    start, stop = batch.tokens_of(segment)
    return Where(
        batch=number,
        path=ref.path,
        sample=ref.index,
        trajectory=ref.trajectory_id,
        turn=segment.turn,
        start=start,
        stop=stop,
    )


def _lengths(batch: Batch) -> tuple[int, ...]:
    if batch.cu_seqlens is not None:
        edges = batch.cu_seqlens.cpu().numpy()
        return tuple(int(length) for length in np.diff(edges))
    if batch.attention_mask is None:
        return (batch.shape[1],) * batch.shape[0]
    return tuple(int(each) for each in rearrange(batch.attention_mask.sum(dim=1).cpu().numpy(), "b -> b"))


def _prompt_lengths(batch: Batch) -> tuple[int, ...]:
    first = [0] * len(batch.refs)
    # Segments come in the order of their tokens: the first of a sequence is written last.
    for part in reversed(batch.host_segments):
        first[batch.sequence_of(part)] = batch.tokens_of(part)[0]
    return tuple(first)
