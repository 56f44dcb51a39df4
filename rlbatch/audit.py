"""Stored rollouts against a model: read, check, collate, score, judge; one report a file.

Files are read in slices, so memory is bounded by a few batches, whatever their size (a recorded .json apart,
which is decoded whole). Prints nothing and knows nothing of the command line but the flags that its findings
name.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from rlbatch.alignment import Judge, LogitsFor, measure
from rlbatch.alignment.drift import too_few
from rlbatch.alignment.judge import REASONS
from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.collate import collate
from rlbatch.errors import Finding, RecordError, ReplyError, StorageError, Where
from rlbatch.figures import Figures
from rlbatch.packing import Room, plan_batches, too_long
from rlbatch.records import Origin, Provenance, Sample
from rlbatch.report import AuditReport, FileReport, Verdict
from rlbatch.scoring import (
    load_model,
    logits_for,
    model_identity,
    trainer_logprobs,
)
from rlbatch.soundness import check_sound
from rlbatch.storage.recordings import Row
from rlbatch.storage.sources import files_of, read_rows
from rlbatch.storage.statements import ModelIdentity, Statement

BATCHES_A_SLICE = 4
"""Samples of one slice are sorted by length before they are batched: more waste less on padding."""
MAX_ROWS_A_SLICE = 1024

TOLD_ELSEWHERE = ("incomparable", "nothing-trained")
"""Codes of `check_sound` that the judge tells of what it cannot explain, and this module of whole files."""

STILL_COMPARED = ("finish-mismatch",)
"""Codes of `check_sound` that leave the tokens that are there comparable: the trainer may name the cause."""

MORE_ROWS = "give more rollouts of the same weights, and check --logprobs-mode and --temperature"
"""What is to be done where there is too little to judge."""

OnProgress: TypeAlias = Callable[[float], None]
"""Called with the share of all files, by size, that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """A loaded model: what scores batches, and what is known of it."""

    path: str
    """Its directory, for findings."""
    identity: ModelIdentity
    device: torch.device
    score: Callable[[Batch], Tensor]
    """Batch on `device` -> [B, T] float32 trainer logprobs, nats."""
    logits_for: LogitsFor | None = None
    """Asked for the logits of suspects; without it some causes cannot be told from each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """How files are read and judged."""

    max_tokens: int
    """Budget of one batch, padding included."""
    statement: Statement = field(default_factory=Statement)
    """What recorded JSON cannot say of its logprobs."""
    skip_refused: bool = False
    """Recorded requests that the engine refused are warnings, and the rest of their file is judged."""
    trainer_version: int | None = None
    """`policy_version` of the model's weights; None where they are those that sampled."""


def load_scorer(path: Path, *, device: str, dtype: torch.dtype) -> Scorer:
    """The model of a directory, ready to score.

    Raises:
        StorageError: the directory holds no whole model.
        ScoringError: the device is not on this machine.
    """
    model = load_model(path, device=device, dtype=dtype)
    return Scorer(
        path=str(path),
        identity=model_identity(path, model),
        device=torch.device(device),
        score=lambda batch: trainer_logprobs(model, batch),
        logits_for=logits_for(model),
    )


def audit(
    paths: Sequence[Path], scorer: Scorer, options: AuditOptions, *, on_progress: OnProgress | None = None
) -> AuditReport:
    """Judge every file; what cannot be used is a verdict on that file, not an exception.

    Args:
        paths: shards, directories of shards (a file each), recorded .json or .jsonl.
        scorer: the model.
        options: how.
        on_progress: told after every slice.

    Raises:
        ScoringError: the model cannot score.
    """
    files = [file for path in paths for file in files_of(path)]
    sizes = [file.stat().st_size if file.is_file() else 0 for file in files]
    reports = []
    for at, file in enumerate(files):
        before, total = sum(sizes[:at]), max(sum(sizes), 1)

        def told(share: float, before: int = before, size: int = sizes[at], total: int = total) -> None:
            if on_progress is not None:
                on_progress((before + share * size) / total)

        reports.append(_FileAudit(file, scorer, options).run(told))
    return AuditReport(files=tuple(reports))


class _FileAudit:
    """What is known of one file while it is read."""

    def __init__(self, path: Path, scorer: Scorer, options: AuditOptions) -> None:
        self._path = path
        self._scorer = scorer
        self._options = options
        self._judge = Judge(trainer_version=options.trainer_version, logits_for=scorer.logits_for)
        self._figures = Figures()
        self._findings: list[Finding] = []
        self._num_samples = 0
        self._num_trained = 0
        self._known: set[Provenance] = set()

    def run(self, on_progress: OnProgress) -> FileReport:
        try:
            rows = read_rows(
                self._path,
                self._options.statement,
                identity=self._scorer.identity,
                skip_refused=self._options.skip_refused,
            )
            for part in slices(rows, max_tokens=BATCHES_A_SLICE * self._options.max_tokens):
                self._take(part)
                on_progress(part[-1].share)
        except (StorageError, ReplyError, RecordError) as error:
            self._findings += error.findings or [_refused(self._path, str(error))]
            # Figures over part of a file would pass for those of the file.
            return self._report("unusable", Figures(), 0)
        return self._judged()

    def _take(self, rows: Sequence[Row]) -> None:
        """Check and score one slice."""
        kept = [(row.index, row.sample) for row in rows if row.sample is not None]
        self._findings += [found for row in rows for found in row.findings]
        self._num_samples += len(kept)
        samples = [sample for _, sample in kept]
        self._num_trained += sum(int(sample.loss_mask.sum()) for sample in samples)
        origins = [Origin(path=str(self._path), index=index) for index, _ in kept]
        self._require_same_model(samples)
        self._require_fit(samples, origins)
        vocab_size = self._scorer.identity.vocab_size
        found = check_sound(samples, purpose="audit", vocab_size=vocab_size, origins=origins)
        told = {found for row in rows for found in row.findings}
        self._findings += [each for each in found if each.code not in TOLD_ELSEWHERE and each not in told]
        faulty = {
            each.where.sample
            for each in found
            if each.severity == "error" and each.code not in STILL_COMPARED
        }
        sound = [pair for pair in zip(samples, origins, strict=True) if pair[1].index not in faulty]
        sound.sort(key=lambda pair: len(pair[0]))
        self._score(sound)

    def _score(self, pairs: Sequence[tuple[Sample, Origin]]) -> None:
        plan = plan_batches(
            [len(sample) for sample, _ in pairs],
            Room(layout="padded", max_tokens=self._options.max_tokens),
            kinds=[sample.logprobs_modes for sample, _ in pairs],
        )
        for indices in plan:
            batch = collate(
                [pairs[index][0] for index in indices],
                layout="padded",
                purpose="audit",
                origins=[pairs[index][1] for index in indices],
            ).to(self._scorer.device)
            with torch.no_grad():
                measured = measure(batch, self._scorer.score(batch))
            self._judge.add(measured)
            log_ratio = measured.ratio.log_ratio[measured.compared]
            self._figures = self._figures.merge(Figures.of(log_ratio.double().cpu().numpy()))

    def _judged(self) -> FileReport:
        verdict = self._judge.verdict()
        self._findings += verdict.findings
        if self._num_samples and not self._num_trained:
            self._findings.append(_nothing_trained(self._path, self._num_samples))
        if any(found.severity == "error" for found in self._findings):
            return self._report("findings", self._figures, self._num_samples)
        told = {found.code for found in self._findings}
        if not verdict.judged and told.isdisjoint(REASONS):
            few = too_few(self._judge.drift.by_age, self._judge.limits)
            self._findings += [
                replace(each, where=Where(path=str(self._path)), fix=MORE_ROWS) for each in few
            ]
        word: Verdict = "sound" if verdict.judged else "not-judged"
        return self._report(word, self._figures, self._num_samples)

    def _report(self, verdict: Verdict, figures: Figures, num_samples: int) -> FileReport:
        order = sorted(self._findings, key=lambda found: (found.severity != "error", found.where.sample or 0))
        return FileReport(
            path=str(self._path),
            verdict=verdict,
            num_samples=num_samples,
            figures=figures,
            findings=tuple(order),
        )

    def _require_same_model(self, samples: Iterable[Sample]) -> None:
        """Stored provenance against the model; what the rollouts do not say cannot be compared."""
        for provenance in {each for sample in samples for each in sample.provenances} - self._known:
            findings = list(_mismatches(provenance, self._scorer, self._path))
            if findings:
                raise StorageError.of(*findings)
            self._known.add(provenance)

    def _require_fit(self, samples: Sequence[Sample], origins: Sequence[Origin]) -> None:
        budget = self._options.max_tokens
        room = Room(layout="padded", max_tokens=budget)
        excess = too_long([len(sample) for sample in samples], room)
        if excess:
            raise StorageError.of(
                finding(
                    "sample-too-long",
                    where=Where(path=str(self._path), sample=origins[excess[0]].index),
                    expected=f"samples of at most {budget} tokens (--max-tokens): none is cut",
                    found=f"{len(samples[excess[0]])} tokens",
                    likely="the budget of one batch is below the longest rollout",
                    fix="raise --max-tokens",
                )
            )


def slices(rows: Iterable[Row], *, max_tokens: int) -> Iterator[list[Row]]:
    """Runs of rows, each closed once it has `max_tokens` tokens or `MAX_ROWS_A_SLICE` rows."""
    part: list[Row] = []
    num_tokens = 0
    for row in rows:
        part.append(row)
        num_tokens += 0 if row.sample is None else len(row.sample)
        if num_tokens >= max_tokens or len(part) == MAX_ROWS_A_SLICE:
            yield part
            part, num_tokens = [], 0
    if part:
        yield part


def _mismatches(provenance: Provenance, scorer: Scorer, path: Path) -> Iterator[Finding]:
    stored, at_hand = provenance.tokenizer_fingerprint, scorer.identity.tokenizer_fingerprint
    if stored is not None and stored != at_hand:
        yield _mismatch(f"tokenizer_fingerprint {stored}", at_hand or "none", scorer, path)
    # A head is often padded: it may have more rows than the tokenizer has ids, never fewer.
    size, rows = provenance.vocab_size, scorer.identity.vocab_size
    if size is not None and (rows is None or rows < size):
        yield _mismatch(f"a vocabulary of at least {size}", str(rows), scorer, path)


def _mismatch(stored: str, found: str, scorer: Scorer, path: Path) -> Finding:
    return finding(
        "model-mismatch",
        where=Where(path=str(path)),
        expected=f"{stored}, as stored",
        found=f"{found} in {scorer.path}",
    )


def _nothing_trained(path: Path, num_samples: int) -> Finding:
    return finding(
        "nothing-trained",
        where=Where(path=str(path)),
        expected="at least one trained token",
        found=f"none in {num_samples} samples",
    )


def _refused(path: Path, complaint: str) -> Finding:
    return finding(
        "file-unusable", where=Where(path=str(path)), expected="samples that fit together", found=complaint
    )
