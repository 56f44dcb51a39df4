"""One choice of a reply as decoded, and the `Turn` it becomes.

`to_turn` holds the rules that are the same for every engine: ids and logprobs are counted against each other,
nulls are counted before any array is made (numpy turns None into NaN in silence), every value is finite, and
the provenance decides under which name the values are kept. Knows no engine's format: readers of recorded
rollouts use it too.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlbatch.catalogue import finding
from rlbatch.engines.lengths import why_unequal
from rlbatch.errors import Finding, ReplyError, Where
from rlbatch.records import FINISH_REASONS, FinishReason, Provenance, Turn, Usage, VersionSpan

MAX_POSITIONS_SHOWN = 5
"""A finding names this many tokens and counts the rest."""

_WORD = re.compile(r"[A-Za-z_-]{1,32}")
"""What an engine calls an end; anything else could be of a prompt or text and is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineOutput:
    """One choice as decoded. Lists are as long as the engine made them; None is what it did not say."""

    label: str
    """What findings call it, e.g. `choice 1`."""
    where: Where = field(default_factory=Where)
    """Where it came from, for readers of files."""
    prompt_token_ids: Sequence[int] | None
    """[P] true ints, 0 <= id < 2**31, as the decoder has checked."""
    completion_token_ids: Sequence[int] | None
    """[C] true ints, 0 <= id < 2**31."""
    logprobs: Sequence[float | None] | None
    """[C] nats; None where the engine reported null."""
    raw_logprobs: Sequence[float | None] | None = None
    """[C] nats of the model's own softmax, from engines that report them beside `logprobs`; else None."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    policy_versions: tuple[VersionSpan, ...] = ()
    """Half-open spans over the completion, as the engine said; empty where it said nothing."""
    usage: Usage = field(default_factory=Usage)
    text: str | None = None
    request_id: str | None = None
    routed_experts: NDArray[np.integer] | None = None
    """[P + C - 1 - start, L, K], with the rows counted already."""
    routed_experts_start: int = 0

    @property
    def aligned(self) -> bool:
        """As many logprobs as ids; what is not said counts as none."""
        return len(self.completion_token_ids or ()) == len(self.logprobs or ())


def to_turn(output: EngineOutput, provenance: Provenance) -> Turn:
    """The turn of one choice; never a token or a logprob more, less or other than the engine reported.

    Args:
        output: one decoded choice.
        provenance: decides where the values go: `inference_logprobs` where they are of the distribution that
            was sampled from, else `raw_inference_logprobs`, with `inference_logprobs` NaN.

    Raises:
        ReplyError: ids-missing, prompt-ids-missing, logprobs-missing, length-mismatch, echo-unsupported,
            logprob-missing, logprob-not-finite, statement-contradicted (version spans) or reply-malformed
            (an unknown finish reason).

    Example:
        ids [5, 2], logprobs [-0.5, -0.25], raw mode at temperature 0.7 ->
        inference_logprobs [NaN, NaN], raw_inference_logprobs [-0.5, -0.25]
    """
    completion = _completion_ids(output)
    prompt = _prompt_ids(output)
    _check_length(output, output.logprobs, provenance)
    values = _logprobs(output, output.logprobs, num_ids=len(completion))
    behaviour = provenance.gives_behaviour_logprobs
    raw = None if behaviour else values
    if output.raw_logprobs is not None:
        _check_length(output, output.raw_logprobs, provenance)
        raw = _logprobs(output, output.raw_logprobs, num_ids=len(completion))
    return Turn(
        prompt_token_ids=_int32(prompt),
        completion_token_ids=_int32(completion),
        inference_logprobs=values if behaviour else np.full_like(values, np.nan),
        raw_inference_logprobs=raw,
        finish_reason=_finish_reason(output),
        stop_reason=output.stop_reason,
        policy_versions=_spans(output, num_ids=len(completion)),
        provenance=provenance,
        usage=output.usage,
        text=output.text,
        request_id=output.request_id,
        routed_experts=output.routed_experts,
        routed_experts_start=output.routed_experts_start,
    )


def _completion_ids(output: EngineOutput) -> Sequence[int]:
    if output.completion_token_ids is None:
        raise _refusal(output, "ids-missing", "the exact ids of the sampled tokens", "no ids")
    return output.completion_token_ids


def _prompt_ids(output: EngineOutput) -> Sequence[int]:
    if output.prompt_token_ids is None:
        raise _refusal(output, "prompt-ids-missing", "the ids of the prompt", "none in reply or request")
    if not output.prompt_token_ids:
        raise _refusal(output, "prompt-ids-missing", "at least one id in the prompt", "an empty list")
    return output.prompt_token_ids


def _logprobs(
    output: EngineOutput, reported: Sequence[float | None] | None, *, num_ids: int
) -> NDArray[np.float32]:
    """[C] float32 nats, every one of them reported and finite."""
    if reported is None and num_ids:
        raise _refusal(output, "logprobs-missing", f"{num_ids} logprobs, one a sampled id", "no logprobs")
    values = reported or ()
    try:
        doubles = _packed(values, "d")
    except struct.error:
        nulls = [at for at, value in enumerate(values) if value is None]
        found = _at("null", nulls, num_ids)
        raise _refusal(output, "logprob-missing", "a logprob for every sampled id", found) from None
    return _finite(output, doubles)


def _int32(ids: Sequence[int]) -> NDArray[np.int32]:
    return _packed(ids, "i")


def _packed(values: Sequence[float | None], kind: Literal["d", "i"]) -> NDArray[Any]:
    """The numbers as an array of C's doubles or ints that can be written to.

    Three times faster than `numpy.array`, and it takes no None, which numpy would make NaN.

    Raises:
        struct.error: one of the values is no number.
    """
    layout = struct.Struct(f"{len(values)}{kind}")
    buffer = bytearray(layout.size)
    layout.pack_into(buffer, 0, *values)
    return np.frombuffer(buffer, kind)


def _finite(output: EngineOutput, values: NDArray[np.float64]) -> NDArray[np.float32]:
    # A double beyond float32 would become infinite here: it is reported, not warned about.
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(narrow)).tolist()
    if bad:
        found = _at("NaN, infinite or beyond float32", bad, len(values))
        raise _refusal(output, "logprob-not-finite", "finite logprobs", found)
    return narrow


def _check_length(
    output: EngineOutput, reported: Sequence[float | None] | None, provenance: Provenance
) -> None:
    """Refuse another number of logprobs than ids; that there are none at all is for `_logprobs` to say."""
    if reported is None:
        return
    prompt, ids = _prompt_ids(output), _completion_ids(output)
    difference = len(reported) - len(ids)
    if not difference:
        return
    side = "logprobs" if difference > 0 else "ids"
    found = f"{len(reported)} logprobs for {len(ids)} ids: {abs(difference)} {side} too many"
    if difference == len(prompt):
        found += ", which is the length of the prompt"
        raise _refusal(output, "echo-unsupported", "logprobs of the completion alone", found)
    stop_ids, stopped = provenance.eos_token_ids, output.finish_reason == "stop"
    why = why_unequal(prompt, ids, reported, stop_ids=stop_ids, stopped=stopped)
    found += f"; {why}" if why else ""
    raise _refusal(output, "length-mismatch", "one logprob for each sampled id", found)


def _finish_reason(output: EngineOutput) -> FinishReason | None:
    if output.finish_reason is None:
        return None
    for known in FINISH_REASONS:
        if output.finish_reason == known:
            return known
    word = _WORD.fullmatch(output.finish_reason)
    shown = repr(output.finish_reason) if word else f"text of {len(output.finish_reason)} characters"
    raise ReplyError.of(
        finding(
            "reply-malformed",
            where=output.where,
            expected=f"finish_reason one of {', '.join(FINISH_REASONS)}",
            found=f"{output.label}: {shown}",
            likely="the engine failed in the middle of the request, or ended it in a way not known here",
            fix="leave this completion out at its source, and look in the engine's log for the cause",
        )
    )


def _spans(output: EngineOutput, *, num_ids: int) -> tuple[VersionSpan, ...]:
    """The spans that hold tokens; together they must cover the completion, each token once."""
    at = 0
    for span in output.policy_versions:
        if span.start != at or span.stop < span.start:
            break
        at = span.stop
    else:
        if at == num_ids or not output.policy_versions:
            # A version that was replaced before its first token has an empty span, which says of no token.
            return tuple(span for span in output.policy_versions if span.stop > span.start)
    shown = ", ".join(f"{span.start}:{span.stop}" for span in output.policy_versions[:MAX_POSITIONS_SHOWN])
    expected = f"spans of versions that cover tokens 0:{num_ids}, each once"
    raise _refusal(
        output, "statement-contradicted", expected, f"{len(output.policy_versions)} spans: {shown}"
    )


def _at(what: str, positions: Sequence[int], total: int) -> str:
    shown = ", ".join(str(at) for at in positions[:MAX_POSITIONS_SHOWN])
    more = ", ..." if len(positions) > MAX_POSITIONS_SHOWN else ""
    return f"{len(positions)} of {total} are {what}, at sampled token {shown}{more}"


def _refusal(output: EngineOutput, code: str, expected: str, found: str) -> ReplyError:
    result: Finding = finding(code, where=output.where, expected=expected, found=f"{output.label}: {found}")
    return ReplyError.of(result)
