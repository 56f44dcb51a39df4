"""`require_aligned`: what it costs on clean data beside bare `alignment_stats`, and what a diagnosis takes.

    python kernels/bench/gate.py [--quick] [--threads N]

Clean: the rows of a whole step at once, padded, as `alignment_stats.py` has them, by which the gate is
judged (`over_stats`); a step of packed micro-batches, one large pack, and one padded micro-batch, where
Python's own time counts; noise of 0.003 nats.
Bad: 32 rows of 2,048 tokens, all spoilt in the same way, up to the error that says so; with logits of a
vocabulary of 1,536, and without any, where nothing depends on the vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import harness
import numpy as np
import torch
import workload
from torch import Tensor

from rlbatch.alignment import Alignment, LogitsFor, require_aligned
from rlbatch.batch import Batch, Layout
from rlbatch.collate import collate
from rlbatch.errors import AlignmentError
from rlbatch.faults import FAULTS
from rlbatch.records import Provenance, Sample, SamplingParams
from rlbatch_kernels import alignment_stats

STEP_ROWS, QUICK_STEP_ROWS = 2048, 512
FULL_LENGTH = 8192
MICRO_BATCH_TOKENS = 32_768
MICRO_ROWS, ROW_TOKENS = 16, 2048
BAD_ROWS = 32
PROMPT_TOKENS = 64
VOCAB_SIZE = 1536
MICRO_RUNS = 20
FULL = "full"
"""The case that is the headline: what the gate costs where statistics cost something themselves."""
NOISE = 0.003
"""Nats in the spread: an engine in bf16."""

TIMED = ("shifted", "rows-permuted", "zero-filled", "wrong-base", "unexplained")
"""Faults of each sort; on the last one every hypothesis is tried in vain."""
OTHER_TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Batches and the trainer's logprobs of them."""

    batches: Sequence[Batch]
    logprobs: Sequence[Tensor]

    def gate(self) -> list[Alignment]:
        return require_aligned(self.batches, self.logprobs, trainer_version=None)

    def gate_and_ratios(self) -> list[Tensor]:
        return [part.ratio for part in self.gate()]

    def bare(self) -> list[Tensor]:
        return [
            alignment_stats(logprobs, batch.inference_logprobs, batch.loss_mask, batch.segments)
            for batch, logprobs in zip(self.batches, self.logprobs, strict=True)
        ]


def step_of(packs: Sequence[Sequence[Sample]], layout: Layout) -> Step:
    """The samples collated, with a trainer that agrees up to noise."""
    batches = [collate(samples, layout=layout) for samples in packs]
    logprobs = [
        torch.nan_to_num(batch.inference_logprobs) + NOISE * torch.randn(batch.shape) for batch in batches
    ]
    return Step(batches=batches, logprobs=logprobs)


def in_packs(samples: Sequence[Sample], num_tokens: int) -> Iterator[list[Sample]]:
    """Samples in order, as many as fit into a pack."""
    pack: list[Sample] = []
    for sample in samples:
        if pack and sum(map(len, pack)) + len(sample) > num_tokens:
            yield pack
            pack = []
        pack.append(sample)
    yield pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of `ROW_TOKENS` sampled tokens each, all drawn from the same logits."""

    samples: Sequence[Sample]
    logits: Tensor
    """[ROW_TOKENS, V]."""

    def logits_for(self, batch: Batch, index: int, start: int, stop: int) -> Tensor:
        first = batch.host_segments[index].start
        return self.logits[start - first : stop - first]


def full_rows(count: int) -> list[Sample]:
    """Rows of `FULL_LENGTH` sampled tokens behind one token of a prompt; they share their values."""
    one = sample_of(
        torch.randint(VOCAB_SIZE, (FULL_LENGTH,)), torch.rand(FULL_LENGTH).log_(), 0, num_prompt=1
    )
    return [replace(one, sample_id=f"{at}#0", trajectory_id=f"{at}") for at in range(count)]


def rows_of(count: int) -> Rows:
    logits = 3 * torch.randn(ROW_TOKENS, VOCAB_SIZE)
    logprobs = torch.log_softmax(logits, dim=1)
    drawn = torch.multinomial(logprobs.exp(), count, replacement=True)
    values = logprobs.gather(1, drawn)
    return Rows(samples=[sample_of(drawn[:, at], values[:, at], at) for at in range(count)], logits=logits)


def sample_of(ids: Tensor, logprobs: Tensor, number: int, num_prompt: int = PROMPT_TOKENS) -> Sample:
    """One row, behind a prompt of its own."""
    provenance = Provenance(
        engine="vllm",
        logprobs_mode="processed",
        sampling=SamplingParams(temperature=1.0),
        vocab_size=VOCAB_SIZE,
    )
    prompt = torch.randint(VOCAB_SIZE, (num_prompt,))
    length = num_prompt + len(ids)
    sampled = np.arange(length) >= num_prompt
    return Sample(
        token_ids=torch.cat([prompt, ids]).to(torch.int32).numpy(),
        inference_logprobs=torch.cat([torch.full((num_prompt,), torch.nan), logprobs]).numpy(),
        loss_mask=sampled,
        advantages=np.zeros(length, np.float32),
        policy_version=np.where(sampled, 3, -1).astype(np.int32),
        temperature=np.ones(length, np.float32),
        turn=np.where(sampled, 0, -1).astype(np.int16),
        sample_id=f"{number}#0",
        trajectory_id=f"{number}",
        provenances=(provenance,),
    )


def bad_steps(rows: Rows) -> dict[str, Step]:
    """The rows spoilt in each way; the trainer is that of the good ones."""
    good = step_of([rows.samples], "padded")
    rng = np.random.default_rng(0)
    steps = {
        code: replace(good, batches=[collate(FAULTS[code].plant(rows.samples, rng), layout="padded")])
        for code in TIMED
    }
    (batch,) = good.batches
    cooler = torch.log_softmax(rows.logits / OTHER_TEMPERATURE, dim=1)
    values = batch.inference_logprobs.clone()
    for at, sample in enumerate(rows.samples):
        values[at, PROMPT_TOKENS - 1 : -1] = cooler.gather(
            1, torch.tensor(sample.token_ids[PROMPT_TOKENS:, None], dtype=torch.int64)
        )[:, 0]
    steps["temperature-mismatch"] = replace(good, batches=[replace(batch, inference_logprobs=values)])
    return steps


def diagnose(step: Step, logits_for: LogitsFor | None) -> set[str]:
    """The codes that the error has."""
    try:
        require_aligned(step.batches, step.logprobs, trainer_version=None, logits_for=logits_for)
    except AlignmentError as error:
        return {found.code for found in error.findings}
    return set()


def clean_steps(num_rows: int) -> dict[str, Step]:
    """What the gate is asked to pass."""
    samples = workload.trajectories(num_rows)
    return {
        FULL: step_of([full_rows(num_rows)], "padded"),
        "step": step_of(list(in_packs(samples, MICRO_BATCH_TOKENS)), "packed"),
        "pack": step_of([samples], "packed"),
        "micro": step_of([rows_of(MICRO_ROWS).samples], "padded"),
    }


def main() -> None:
    given = harness.arguments(__doc__ or "")
    runs = harness.QUICK_RUNS if given.quick else harness.RUNS
    figures: dict[str, float | int | None] = {}
    times: dict[str, float] = {}
    for name, step in clean_steps(QUICK_STEP_ROWS if given.quick else STEP_ROWS).items():
        cases: dict[str, harness.Case | None] = {
            f"{name}: alignment_stats": step.bare,
            f"{name}: require_aligned": step.gate,
            f"{name}: and the ratios": step.gate_and_ratios,
        }
        # A micro-batch takes a fraction of a millisecond: more rounds, for the same seconds.
        times |= harness.medians(cases, runs * (MICRO_RUNS if name == "micro" else 1))
        key = "over_stats" if name == FULL else f"{name}_over_stats"
        figures[key] = harness.ratio(times, f"{name}: require_aligned", f"{name}: alignment_stats")
        figures[f"{name}_ratios_over_stats"] = harness.ratio(
            times, f"{name}: and the ratios", f"{name}: alignment_stats"
        )
        figures[f"{name}_tokens"] = sum(logprobs.numel() for logprobs in step.logprobs)
    rows = rows_of(BAD_ROWS)
    steps = bad_steps(rows)
    for how, asked in (("with_logits", rows.logits_for), ("without_logits", None)):
        for code, step in steps.items():
            print(f"{how}, {code}: told {', '.join(sorted(diagnose(step, asked)))}")
        taken = harness.medians(
            {f"{how}: {code}": partial(diagnose, step, asked) for code, step in steps.items()},
            1 if given.quick else runs,
        )
        times |= taken
        figures[f"diagnosis_seconds_{how}"] = max(taken.values())
    print(f"{torch.get_num_threads()} threads")
    harness.report(times, figures)


if __name__ == "__main__":
    main()
