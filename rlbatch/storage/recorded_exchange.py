"""A recorded exchange with an engine: what was sent where, and the reply as it came, read as its turns.

    {endpoint, request, status, response | sse | response_text}

The endpoint says whose reply it is as far as it can; the caller says which engine, and both must fit. Where a
request has its sampling fields, and under which names, is each engine's own. Knows nothing of files.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from rlbatch.catalogue import finding
from rlbatch.engines import ResponseAssembler, fireworks_request, parse_response, sglang_request
from rlbatch.engines.body import error_in, no_reply
from rlbatch.errors import Finding, RecordError, ReplyError, Where
from rlbatch.records import Provenance, Turn
from rlbatch.storage.recorded_sampling import sampling_of_request
from rlbatch.storage.statements import FlagUse, ModelIdentity, Statement, provenance_of

_HTTP_OK = 200
_GENERATE = "/inference/v1/generate"

ENDPOINTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fireworks": ("/inference/v1/completions", "/inference/v1/chat/completions"),
        "sglang": ("/generate",),
        "vllm": ("/v1/completions", "/v1/chat/completions", _GENERATE),
    }
)
"""Paths of each engine whose replies hold exact ids."""

EXCHANGE = "a reply wrapper {endpoint, request, response}"


class Exchange(msgspec.Struct):
    """One as decoded; every field may be absent."""

    endpoint: str | None = None
    request: object = None
    status: int | None = None
    response: msgspec.Raw = msgspec.Raw()
    """As it stands in the file, for `parse_response`; empty where there is none."""
    sse: str | None = None
    response_text: str | None = None

    @property
    def body(self) -> bytes:
        """The reply's body, where it did not come as a stream."""
        return bytes(self.response) or (self.response_text or "").encode()


def refused_request(exchange: Exchange) -> Finding | None:
    """That the engine refused the request and so sampled nothing; None where it did not.

    A stream that breaks off with an error did sample, and is refused where it is read.
    """
    if exchange.sse is not None or exchange.status == _HTTP_OK:
        return None
    told = error_in(exchange.body)
    if exchange.status is None:
        return None if told is None else told.findings[0]
    return finding(
        "reply-error-body",
        expected=f"a reply with status {_HTTP_OK}",
        found=f"status {exchange.status}" + ("" if told is None else f", {told.findings[0].found}"),
    )


def provenance_of_exchange(
    exchange: Exchange,
    statement: Statement,
    *,
    identity: ModelIdentity | None,
    where: Where,
    use: FlagUse | None,
) -> Provenance:
    """How the reply's logprobs came to be, by the request and the statement.

    Whatever is no reply at all is refused before anything is asked of the caller.

    Raises:
        ReplyError: route-unsupported, reply-malformed, provenance-missing or
            statement-contradicted.
    """
    owners = [name for name, paths in ENDPOINTS.items() if exchange.endpoint in paths]
    if exchange.sse is None and not owners:
        raise no_reply(exchange.body, complaint=f"a body of {exchange.endpoint}")
    if not isinstance(exchange.request, Mapping):
        raise _malformed("a wrapper without the request's object", where)
    engine = statement.engine
    if engine is not None and owners and engine not in owners:
        raise _other_engine(exchange.endpoint, engine, owners, where)
    # Without a stated engine the endpoint's names serve to say what else is missing.
    named = engine or (owners or ["vllm"])[0]
    fields = _FIELDS[named](exchange.request, exchange.endpoint)
    if fields is None:
        raise _malformed("a request without the object `sampling_params`", where)
    said = sampling_of_request(fields, where)
    return provenance_of(said, statement, identity=identity, where=where, use=use)


def turns_of_exchange(exchange: Exchange, provenance: Provenance) -> list[Turn]:
    """The turns of the reply, one a choice.

    Raises:
        ReplyError: as `parse_response` and `ResponseAssembler`.
    """
    request = exchange.request if isinstance(exchange.request, Mapping) else None
    try:
        if exchange.sse is None:
            return parse_response(exchange.body, request=request, provenance=provenance)
        assembler = ResponseAssembler(request=request, provenance=provenance)
        assembler.feed(exchange.sse)
        return assembler.finish()
    except RecordError as error:
        # The request is part of the file here, not an argument of the caller's.
        raise _malformed(str(error), Where()) from None


_Fields = Callable[[Mapping[str, object], str | None], Mapping[str, object] | None]


def _vllm_fields(request: Mapping[str, object], endpoint: str | None) -> Mapping[str, object] | None:
    fields = request.get("sampling_params") if endpoint == _GENERATE else request
    return fields if isinstance(fields, Mapping) else None


def _sglang_fields(request: Mapping[str, object], _: str | None) -> Mapping[str, object] | None:
    return sglang_request.sampling_fields(request)


def _fireworks_fields(request: Mapping[str, object], _: str | None) -> Mapping[str, object] | None:
    return fireworks_request.sampling_fields(request)


_FIELDS: Mapping[str, _Fields] = MappingProxyType(
    {"fireworks": _fireworks_fields, "sglang": _sglang_fields, "vllm": _vllm_fields}
)
"""Each engine's sampling fields under vLLM's names; None where the request has them in no usable form."""


def _other_engine(endpoint: str | None, engine: str, owners: list[str], where: Where) -> ReplyError:
    known = " or ".join(owners)
    return ReplyError.of(
        finding(
            "statement-contradicted",
            where=where,
            expected=f"--engine of the recorded endpoint {endpoint}: {known}",
            found=f"--engine {engine}",
            likely="the flag is meant for another file",
            fix=f"state --engine {known}",
        )
    )


def _malformed(complaint: str, where: Where) -> ReplyError:
    return ReplyError.of(finding("reply-malformed", where=where, expected=EXCHANGE, found=complaint))
