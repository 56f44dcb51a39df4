"""What every entry point asks of its caller, and how a refusal gets the caller's name for the request.

Knows no engine.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, RecordError, ReplyError
from rlbatch.records import Provenance


def stated_engine(
    caller: str, engine: str | None, engines: Collection[str], request: object, provenance: object
) -> str:
    """The engine whose reply it is: the provenance's, which one that is stated beside it must not deny.

    Raises:
        ReplyError: route-unsupported or statement-contradicted.
        RecordError: `provenance` or `request` is of another type.
    """
    if not isinstance(provenance, Provenance):
        raise RecordError(f"{caller}: expected a Provenance, found {type(provenance).__name__}")
    if request is not None and not isinstance(request, Mapping):
        raise RecordError(f"{caller}: expected the request's object, found {type(request).__name__}")
    named = provenance.engine.casefold() if engine is None else engine
    if named not in engines:
        raise ReplyError.of(_unknown_engine(named, engines))
    if provenance.engine.casefold() != named:
        raise ReplyError.of(_other_engine(named, provenance))
    return named


@contextmanager
def with_request_id(
    request_id: str | None, told: Callable[[ReplyError], None] | None = None
) -> Iterator[None]:
    """Put the caller's name for the request into every finding of a refusal, and tell who wants to know."""
    try:
        yield
    except ReplyError as error:
        named = _named(error, request_id)
        if told is not None:
            told(named)
        if named is error:
            raise
        raise named from None


def _named(error: ReplyError, request_id: str | None) -> ReplyError:
    if request_id is None:
        return error
    places = (replace(each, where=replace(each.where, request=request_id)) for each in error.findings)
    return ReplyError.of(*places)


def _unknown_engine(engine: str, engines: Collection[str]) -> Finding:
    return finding(
        "route-unsupported",
        expected=f"an engine that this release reads: {', '.join(sorted(engines))}",
        found=f"engine {engine!r}",
        likely="a misspelt name, or an engine that is not supported yet",
        fix="name one of these in Provenance(engine=...)",
    )


def _other_engine(engine: str, provenance: Provenance) -> Finding:
    return finding(
        "statement-contradicted",
        expected="the engine of the reply in its provenance",
        found=f"engine={engine!r} with a provenance of {provenance.engine!r}",
    )
