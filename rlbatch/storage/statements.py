"""What is said about recorded logprobs, by the file and by whoever reads it, and the `Provenance` that makes.

A recorded file says how its tokens were drawn, in part; it never says what its logprobs are of. The rest is a
`Statement`, which the command line fills from flags. What nobody says is refused, and so is what the two say
differently: nothing is guessed, and a server's name is never read. Knows nothing of ids or logprobs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from rlbatch.catalogue import finding
from rlbatch.engines.sampling_fields import as_off
from rlbatch.errors import Finding, RecordError, ReplyError, Where
from rlbatch.records import LogprobsMode, Provenance, SamplingParams
from rlbatch.storage.recorded_sampling import NEUTRAL, SAMPLING_FIELDS, bad_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What the reader of a file says of it; None says nothing.

    The fields from `temperature` on are those of `SamplingParams`, name by name.
    """

    engine: str | None = None
    """The engine that sampled: `vllm`, `sglang` or `fireworks`."""
    engine_version: str | None = None
    """Its version, kept for the record."""
    logprobs_mode: LogprobsMode | None = None
    """What the logprobs are of: `processed`, `raw` or `unknown`."""
    temperature: float | None = None
    """Divisor of the logits; 0 is greedy."""
    top_p: float | None = None
    """Nucleus sampling; 1 is off."""
    top_k: int | None = None
    """Most probable tokens kept; 0 and -1 are off."""
    min_p: float | None = None
    """Least probability kept, relative to the greatest; 0 is off."""
    repetition_penalty: float | None = None
    """1 is off."""
    presence_penalty: float | None = None
    """0 is off."""
    frequency_penalty: float | None = None
    """0 is off."""
    logit_bias: bool | None = None
    """Whether logits were biased."""
    allowed_token_ids: bool | None = None
    """Whether only listed ids could be drawn."""
    bad_words: bool | None = None
    """Whether listed words could not be drawn."""
    min_tokens: int | None = None
    """Tokens before which no stop token could be drawn; 0 is off."""
    structured_output: bool | None = None
    """Whether a grammar was in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """The model that rollouts came from, where it is at hand: kept in provenance, to be checked later."""

    tokenizer_fingerprint: str | None = None
    """sha256 of its `tokenizer.json`."""
    vocab_size: int | None = None
    """Ids that it can read and predict."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a completion."""
    bos_token_id: int | None = None
    """What every prompt begins with, once; None where that is not so, or nobody knows."""

    def complete(self, provenance: Provenance) -> Provenance:
        """The provenance with what it does not say; one that states another tokenizer is left as it is."""
        stated = provenance.tokenizer_fingerprint
        if stated is not None and stated != self.tokenizer_fingerprint:
            return provenance
        silent = {
            spec.name: getattr(self, spec.name)
            for spec in fields(self)
            if getattr(provenance, spec.name) in (None, ())
        }
        return replace(provenance, **silent)


@dataclass(slots=True)
class FlagUse:
    """What became of the statement's flags in a file of many documents, each sampled in its own way.

    A flag speaks for the documents that are silent. One that none of them needs, and some deny, was meant for
    another file.
    """

    line: int = 0
    """The document that is read now."""
    needed: set[str] = field(default_factory=set)
    denied: dict[str, Finding] = field(default_factory=dict)
    """The first document that denies each flag."""

    def take(self, stated: Iterable[str], denied: Mapping[str, Finding], said: Iterable[str]) -> None:
        """Note what one document does with the flags that are stated."""
        self.needed |= set(stated) - set(said)
        for name, found in denied.items():
            self.denied.setdefault(name, replace(found, found=f"line {self.line}: {found.found}"))

    def require_meant(self) -> None:
        """Once all is read.

        Raises:
            ReplyError: statement-contradicted, for each flag that was denied and needed by no document.
        """
        unmeant = [found for name, found in self.denied.items() if name not in self.needed]
        if unmeant:
            raise ReplyError.of(*unmeant)


def flag_of(name: str) -> str:
    """The command-line flag of a `Statement` field.

    Example:
        logprobs_mode -> --logprobs-mode
    """
    return "--" + name.replace("_", "-")


def provenance_of(
    said: Mapping[str, object],
    statement: Statement,
    *,
    identity: ModelIdentity | None = None,
    where: Where,
    use: FlagUse | None = None,
) -> Provenance:
    """The provenance that file and statement make together; what the file says it says for certain.

    Args:
        said: fields of `SamplingParams` by the file.
        statement: what the reader says; engine and logprobs_mode can come from nowhere else.
        identity: the model that sampled, where it is known.
        where: the file, for findings.
        use: of a file of many documents, which may deny flags that others need; without it none may.

    Raises:
        ReplyError: provenance-missing, naming the flag of each field that nobody states;
            statement-contradicted, for each that both state differently; reply-malformed, no engine takes
            the value.
    """
    stated = {name: value for name, value in _stated(statement).items() if name in SAMPLING_FIELDS}
    _sampling({"temperature": 1.0, **stated}, where)
    if use is None:
        _require_agreement(said, stated, where)
    else:
        use.take(stated, _denied(said, stated, where), said)
    values = {**stated, **said}
    missing = [name for name in ("engine", "logprobs_mode") if getattr(statement, name) is None]
    missing += [name for name in SAMPLING_FIELDS if name not in values]
    # The first two are named again for mypy: neither can be None past this point.
    if missing or statement.engine is None or statement.logprobs_mode is None:
        raise ReplyError.of(_missing(missing, where))
    provenance = Provenance(
        engine=statement.engine,
        engine_version=statement.engine_version,
        logprobs_mode=statement.logprobs_mode,
        sampling=_sampling(values, where),
    )
    return provenance if identity is None else identity.complete(provenance)


def _sampling(values: Mapping[str, object], where: Where) -> SamplingParams:
    try:
        return SamplingParams(**values)  # type: ignore[arg-type]
    except RecordError as error:
        raise ReplyError.of(bad_value(str(error), where)) from None


def require_agreement(provenances: Iterable[Provenance], statement: Statement, where: Where) -> None:
    """Stored provenances must not be denied by what the reader states.

    Raises:
        ReplyError: statement-contradicted, for each field.
    """
    for provenance in provenances:
        said: dict[str, object] = {
            name: getattr(provenance.sampling, name) if name in SAMPLING_FIELDS else getattr(provenance, name)
            for name in _stated(statement)
        }
        _require_agreement(said, _stated(statement), where)


def _stated(statement: Statement) -> dict[str, object]:
    """The fields on which the statement is not silent."""
    values = {spec.name: getattr(statement, spec.name) for spec in fields(statement)}
    return {name: as_off(name, value) for name, value in values.items() if value is not None}


def _require_agreement(said: Mapping[str, object], stated: Mapping[str, object], where: Where) -> None:
    denied = _denied(said, stated, where)
    if denied:
        raise ReplyError.of(*denied.values())


def _denied(said: Mapping[str, object], stated: Mapping[str, object], where: Where) -> dict[str, Finding]:
    return {
        name: _contradicted(name, said[name], value, where)
        for name, value in stated.items()
        if name in said and said[name] != value
    }


def _missing(names: list[str], where: Where) -> Finding:
    flags = ", ".join(_either(name) for name in names)
    return finding(
        "provenance-missing",
        where=where,
        expected=f"{', '.join(names)} stated by the file or by a flag",
        found="neither states " + ("it" if len(names) == 1 else "them"),
        fix=f"state what was in force with {flags}",
    )


def _either(name: str) -> str:
    """The flag with its negation, where it has one."""
    switch = isinstance(getattr(NEUTRAL, name, None), bool)
    return flag_of(name).replace("--", "--[no-]", 1) if switch else flag_of(name)


def _contradicted(name: str, said: object, stated: object, where: Where) -> Finding:
    return finding(
        "statement-contradicted",
        where=where,
        expected=f"{flag_of(name)} as in the file: {said}",
        found=f"{flag_of(name)} {stated}",
        likely="the flag is meant for another file",
        fix=f"leave {flag_of(name)} out for this file, or correct it",
    )
