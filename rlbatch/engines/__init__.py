"""Engine replies to turns: `parse_response`, the one way in for ids and logprobs.

A module an engine; each decodes a reply into `EngineOutput`s and `output.to_turn` makes the records. Nothing
is encoded, filled or cut here: what cannot become exact tokens with exact logprobs is refused. Knows nothing
of HTTP, of rewards, or of what becomes of a turn.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from rlbatch.catalogue import finding
from rlbatch.engines import vllm
from rlbatch.engines.body import MAX_REPLY_BYTES
from rlbatch.engines.output import EngineOutput, to_turn
from rlbatch.errors import Finding, RecordError, ReplyError
from rlbatch.records import Provenance, Turn

__all__ = ["ENGINES", "MAX_REPLY_BYTES", "parse_response"]

Reader = Callable[[object, Mapping[str, object] | None, Provenance], list[EngineOutput]]

ENGINES: Mapping[str, Reader] = MappingProxyType({"vllm": vllm.read_reply})
"""What decodes each engine's replies."""


def parse_response(
    payload: bytes | str | Mapping[str, object],
    *,
    engine: str = "vllm",
    request: Mapping[str, object] | None = None,
    provenance: Provenance,
) -> list[Turn]:
    """One turn a choice of an engine's reply, ordered by the choices' index.

    The route is told from the body's shape. Prompt ids come from the reply, else from the request; where both
    have them they must agree. A request that contradicts the reply or the provenance is refused.

    Args:
        payload: the reply's body, as bytes, text or the decoded object; never a recording's wrapper. It is
            not changed.
        engine: a name in `ENGINES`.
        request: the body of the request that was sent, where it is at hand. A field that is absent or null
            contradicts nothing.
        provenance: how the logprobs came to be, which no reply says.

    Returns:
        Turns with exact ids and one logprob (nats) for each; `inference_logprobs` where the provenance says
        that they are of the distribution that was sampled from, else `raw_inference_logprobs`.

    Raises:
        ReplyError: the reply cannot become exact tokens with exact logprobs; `.code` says why.
        RecordError: `provenance` or `request` is not of the type above.

    Example:
        `parse_response(reply.content, request=body, provenance=provenance)` -> `[turn]` for n = 1
    """
    if not isinstance(provenance, Provenance):
        raise RecordError(f"parse_response: expected a Provenance, found {type(provenance).__name__}")
    if request is not None and not isinstance(request, Mapping):
        raise RecordError(f"parse_response: expected the request's object, found {type(request).__name__}")
    reader = ENGINES.get(engine)
    if reader is None:
        raise ReplyError.of(_unknown_engine(engine))
    if provenance.engine.casefold() != engine:
        raise ReplyError.of(_other_engine(engine, provenance))
    return [to_turn(output, provenance) for output in reader(payload, request, provenance)]


def _unknown_engine(engine: str) -> Finding:
    return finding(
        "route-unsupported",
        expected=f"an engine that this release reads: {', '.join(sorted(ENGINES))}",
        found=f"engine {engine!r}",
        likely="a misspelt name, or an engine that is not supported yet",
        fix="pass engine= one of these names",
    )


def _other_engine(engine: str, provenance: Provenance) -> Finding:
    return finding(
        "statement-contradicted",
        expected="the engine of the reply in its provenance",
        found=f"engine={engine!r} with a provenance of {provenance.engine!r}",
    )
