"""Every error of rlbatch, and `Finding` with its one rendering.

    RlbatchError
    ├── RecordError(ValueError)              a record whose structure cannot be right
    ├── ReplyError(ValueError, RuntimeError) an engine's reply that is refused
    ├── SoundnessError(ValueError)           faults that show without a trainer
    ├── StorageError(OSError)                a file that cannot be used, or a write that failed
    ├── ScoringError(RuntimeError)           a model whose logprobs cannot be had, or not trusted
    │   └── PackingLeakError                 a model that attends across packed sequences
    └── AlignmentError(ValueError)           faults that show against the trainer's logprobs

Knows nothing of tokens or tensors. Errors pickle to the same type, text and fields, and carry positions
and counts, never token text, prompts or keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

Severity = Literal["error", "warning"]

MAX_FINDINGS_SHOWN = 8
"""An error's text shows this many findings and counts the rest; `.findings` holds them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The place of a finding; what does not apply is None."""

    path: str | None = None
    """File the sample came from."""
    sample: int | None = None
    """Index of the sample in its file, or in the list that was checked."""
    trajectory: str | None = None
    """Trajectory id."""
    turn: int | None = None
    """Turn of the trajectory."""
    start: int | None = None
    """First token, counted in the sample's own `token_ids`, whatever the layout."""
    stop: int | None = None
    """One past the last token."""
    rank: int | None = None
    """Process that found it, where several judged one step."""
    batch: int | None = None
    """Which of the micro-batches that were judged together; None where it was one."""
    request: str | None = None
    """The caller's own name for the request whose reply it is."""

    def __str__(self) -> str:
        sample = None if self.sample is None else f"sample {self.sample}"
        head = " ".join(part for part in (self.path, sample) if part is not None)
        parts = [f"rank {self.rank}"] if self.rank is not None else []
        parts += [f"micro-batch {self.batch}"] if self.batch is not None else []
        parts += [head] if head else []
        if self.request is not None:
            parts.append(f"request {self.request!r}")
        if self.trajectory is not None:
            parts.append(f"trajectory {self.trajectory!r}")
        if self.turn is not None:
            parts.append(f"turn {self.turn}")
        if self.start is not None and self.stop is not None:
            parts.append(f"tokens {self.start}:{self.stop}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault or doubt: what, where, what was expected, what was found, why, and how to mend it."""

    code: str
    """Kebab-case, permanent, listed in `rlbatch.catalogue`."""
    severity: Severity
    where: Where = field(default_factory=Where)
    expected: str
    found: str
    likely: str
    fix: str

    def __str__(self) -> str:
        return self.text(whole=True)

    def text(self, *, whole: bool) -> str:
        """As it is printed; not whole where one before it said what is likely and how to mend it."""
        remedy = (
            [f"  likely:   {self.likely}", f"  fix:      {self.fix}"]
            if whole
            else [f"  likely and fix as for {self.code} above"]
        )
        return "\n".join(
            [
                f"[{self.code}] {self.where}".rstrip(),
                f"  expected: {self.expected}",
                f"  found:    {self.found}",
                *remedy,
            ]
        )


def render(findings: Sequence[Finding]) -> str:
    """The text that errors and reports share; at most `MAX_FINDINGS_SHOWN` findings, the rest counted.

    Findings of one cause tell what is likely, and how to mend it, once: with the first of them.
    """
    shown: list[str] = []
    told: set[tuple[str, str, str]] = set()
    for finding in findings[:MAX_FINDINGS_SHOWN]:
        cause = (finding.code, finding.likely, finding.fix)
        shown.append(finding.text(whole=cause not in told))
        told.add(cause)
    rest = len(findings) - len(shown)
    if rest:
        shown.append(f"... and {rest} more of {len(findings)} findings (all in .findings)")
    return "\n".join(shown)


class RlbatchError(Exception):
    """Root of all errors of rlbatch.

    Attributes:
        findings: what was found, most important first; empty where the text says it all.
    """

    def __init__(self, message: str, *, findings: Sequence[Finding] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)

    @classmethod
    def of(cls, *findings: Finding) -> Self:
        """The error that says these findings."""
        return cls(render(findings), findings=findings)

    @property
    def code(self) -> str | None:
        """Code of the first finding."""
        return self.findings[0].code if self.findings else None

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self.args, dict(self.__dict__))


def _restore(kind: type[RlbatchError], args: tuple[object, ...], fields: dict[str, object]) -> RlbatchError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class RecordError(RlbatchError, ValueError):
    """A record was given a type, dtype, shape or length that cannot be right."""


class ReplyError(RlbatchError, ValueError, RuntimeError):
    """An engine's reply is refused: it cannot become exact tokens with exact logprobs."""


class SoundnessError(RlbatchError, ValueError):
    """Samples have faults that can be known without a trainer."""


class StorageError(RlbatchError, OSError):
    """A file cannot be used, or could not be written."""


class ScoringError(RlbatchError, RuntimeError):
    """Trainer logprobs cannot be computed with this model, or could not be trusted."""


class PackingLeakError(ScoringError):
    """The model attends across the boundaries of packed sequences."""


class AlignmentError(RlbatchError, ValueError):
    """Trainer and inference logprobs do not speak of the same tokens under the same distribution."""
