"""Engine replies to turns: `parse_response` and, for streams, `ResponseAssembler`: the ways in.

A module an engine; each decodes a reply into `EngineOutput`s and `output.to_turn` makes the records. Nothing
is encoded, filled or cut here: what cannot become exact tokens with exact logprobs is refused. Knows nothing
of HTTP, of rewards, or of what becomes of a turn.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rlbatch.engines import fireworks, sglang, vllm
from rlbatch.engines.body import MAX_REPLY_BYTES
from rlbatch.engines.output import EngineOutput, to_turn
from rlbatch.engines.stated import stated_engine, with_request_id
from rlbatch.engines.stream import STREAMS, ResponseAssembler
from rlbatch.engines.vllm_object import RequestOutput
from rlbatch.records import Provenance, Turn

__all__ = ["ENGINES", "MAX_REPLY_BYTES", "ResponseAssembler", "STREAMS", "parse_response"]

Reader = Callable[[object, Mapping[str, object] | None, Provenance], list[EngineOutput]]

ENGINES: Mapping[str, Reader] = MappingProxyType(
    {"fireworks": fireworks.read_reply, "sglang": sglang.read_reply, "vllm": vllm.read_reply}
)
"""What decodes each engine's replies."""


def parse_response(
    payload: bytes | str | Mapping[str, object] | Sequence[Mapping[str, object]] | RequestOutput,
    *,
    engine: str | None = None,
    request: Mapping[str, object] | None = None,
    provenance: Provenance,
    request_id: str | None = None,
) -> list[Turn]:
    """One turn a choice of an engine's reply, ordered by the choices' index.

    The route is told from the body's shape. Prompt ids come from the reply, else from the request; where both
    have them they must agree. A request that contradicts the reply or the provenance is refused.

    Args:
        payload: the reply's body, as bytes, text or what JSON decodes it to, or the output object of vLLM in
            process; never a recording's wrapper. It is not changed. Streams are for `ResponseAssembler`.
        engine: a name in `ENGINES`; None takes the provenance's.
        request: the body of the request that was sent, where it is at hand. A field that is absent or null
            contradicts nothing. Without it the provenance is taken at its word.
        provenance: how the logprobs came to be, which no reply says.
        request_id: the caller's own name for the request, which errors then show.

    Returns:
        Turns with exact ids and one logprob (nats) for each; `inference_logprobs` where the provenance says
        that they are of the distribution that was sampled from, else `raw_inference_logprobs`.

    Raises:
        ReplyError: the reply cannot become exact tokens with exact logprobs; `.code` says why.
        RecordError: `provenance` or `request` is not of the type above, or the request's prompt is in no form
            that a request has.

    Example:
        `parse_response(reply.content, request=body, provenance=provenance)` -> `[turn]` for n = 1
    """
    read = ENGINES[stated_engine("parse_response", engine, ENGINES.keys(), request, provenance)]
    with with_request_id(request_id):
        return [to_turn(output, provenance) for output in read(payload, request, provenance)]
