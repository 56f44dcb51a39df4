"""Time and memory of parsing a long completions reply and a long stream, beside json and pydantic.

    python kernels/bench/parse_reply.py [NUM_TOKENS]

The reply has what vLLM sends with logprobs=1 and return_token_ids: strings, offsets and alternatives too. The
streams have the same tokens, 1, 4 and 16 a chunk. Each figure is the median of 9 runs; memory is the peak
that tracemalloc sees, payload excluded. pydantic is used where it is installed. What no parser on msgspec can
be faster than stands beside it: a scan that builds nothing, ids and logprobs alone, the alternatives too; and
of a stream, its chunks decoded and dropped.
"""

import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from rlbatch.engines import ResponseAssembler, parse_response
from rlbatch.engines.vllm_chunk import Chunk
from rlbatch.records import Provenance, SamplingParams

RUNS = 9
NUM_TOKENS = 32_768
NUM_PROMPT = 512
WORDS = (" apples", " starts", " with", ".", " 12", "\n", " Chen", "ing", " the", ",", ' "', "####")
PROVENANCE = Provenance(engine="vllm", logprobs_mode="processed", sampling=SamplingParams(temperature=1.0))


def tokens_of(num_tokens: int) -> dict[str, list[Any]]:
    """Ids, strings, offsets and logprobs (float32 printed as doubles) of a made-up completion."""
    random.seed(0)
    words = random.choices(WORDS, k=num_tokens)
    offsets = np.cumsum([0, *(len(word) for word in words[:-1])]).tolist()
    values = np.float32([-(random.expovariate(1.0) ** 3) for _ in words]).astype(float).tolist()
    return {
        "token_ids": random.choices(range(150_000), k=num_tokens),
        "tokens": words,
        "text_offset": offsets,
        "token_logprobs": values,
        "top_logprobs": [{word: value} for word, value in zip(words, values, strict=True)],
    }


def choice_of(said: dict[str, list[Any]], start: int, stop: int, *, last: bool) -> dict[str, Any]:
    part = {name: values[start:stop] for name, values in said.items()}
    return {
        "index": 0,
        "text": "".join(part["tokens"]),
        "logprobs": {name: values for name, values in part.items() if name != "token_ids"},
        "finish_reason": "length" if last else None,
        "stop_reason": None,
        "prompt_token_ids": list(range(NUM_PROMPT)) if start == 0 else None,
        "token_ids": part["token_ids"],
    }


def body_of(choices: list[Any], num_tokens: int | None) -> dict[str, Any]:
    usage = None
    if num_tokens is not None:
        usage = {"prompt_tokens": NUM_PROMPT, "completion_tokens": num_tokens}
        usage["total_tokens"] = NUM_PROMPT + num_tokens
    return {"id": "cmpl-0", "object": "text_completion", "model": "m", "choices": choices, "usage": usage}


def encode(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def stream_of(said: dict[str, list[Any]], num_tokens: int, each: int) -> bytes:
    events = []
    for start in range(0, num_tokens, each):
        stop = min(start + each, num_tokens)
        chunk = body_of([choice_of(said, start, stop, last=stop == num_tokens)], None)
        events.append(b"data: " + encode(chunk) + b"\n\n")
    events.append(b"data: " + encode(body_of([], num_tokens)) + b"\n\n")
    return b"".join([*events, b"data: [DONE]\n\n"])


def assemble(stream: bytes) -> None:
    assembler = ResponseAssembler(provenance=PROVENANCE)
    for start in range(0, len(stream), 65_536):
        assembler.feed(stream[start : start + 65_536])
    assembler.finish()


class Scan(msgspec.Struct):
    """Every byte is looked at, and nothing kept."""

    unheard_of: object = None


class BareLogprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float]


class BareChoice(msgspec.Struct, gc=False):
    token_ids: list[int]
    logprobs: BareLogprobs


class Bare(msgspec.Struct, gc=False):
    """Ids and logprobs, without a rule."""

    choices: list[BareChoice]


class AlternativesOnly(msgspec.Struct, gc=False):
    top_logprobs: list[dict[str, float]]


class ChoiceOfAlternatives(msgspec.Struct, gc=False):
    logprobs: AlternativesOnly


class OfAlternatives(msgspec.Struct, gc=False):
    """Completions' `top_logprobs`, without a rule."""

    choices: list[ChoiceOfAlternatives]


def decode_each(chunks: list[bytes]) -> None:
    decoder = msgspec.json.Decoder(Chunk)
    for chunk in chunks:
        decoder.decode(chunk)


def pydantic_reader() -> Callable[[bytes], Any] | None:
    try:
        from pydantic import BaseModel
    except ImportError:
        return None

    class Logprobs(BaseModel):
        token_logprobs: list[float | None]
        tokens: list[str]
        text_offset: list[int]
        top_logprobs: list[dict[str, float] | None]

    class Choice(BaseModel):
        index: int
        text: str
        token_ids: list[int]
        prompt_token_ids: list[int] | None
        logprobs: Logprobs
        finish_reason: str | None

    class Body(BaseModel):
        id: str
        choices: list[Choice]

    return Body.model_validate_json


def measure(run: Callable[[], Any]) -> tuple[float, float]:
    """Median milliseconds, and the peak of traced memory in MB of one more run."""
    run()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return statistics.median(times) * 1e3, peak / 1e6


def main() -> None:
    num_tokens = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_TOKENS
    said = tokens_of(num_tokens)
    reply = encode(body_of([choice_of(said, 0, num_tokens, last=True)], num_tokens))
    print(f"{num_tokens} tokens, a reply of {len(reply) / 1e6:.2f} MB, median of {RUNS}")
    readers: list[tuple[str, Callable[[], Any]]] = [
        ("parse_response", lambda: parse_response(reply, provenance=PROVENANCE)),
        ("json.loads", lambda: json.loads(reply)),
    ]
    validate = pydantic_reader()
    if validate is not None:
        readers.append(("pydantic", lambda: validate(reply)))
    readers += [
        ("msgspec, a scan", lambda: msgspec.json.decode(reply, type=Scan)),
        ("msgspec, ids, logprobs", lambda: msgspec.json.decode(reply, type=Bare)),
        ("msgspec, alternatives", lambda: msgspec.json.decode(reply, type=OfAlternatives)),
    ]
    for name, run in readers:
        milliseconds, megabytes = measure(run)
        print(f"{name:24s} {milliseconds:8.2f} ms {megabytes:8.2f} MB")
    for each in (1, 4, 16):
        stream = stream_of(said, num_tokens, each)
        milliseconds, megabytes = measure(lambda stream=stream: assemble(stream))  # type: ignore[misc]
        rate = num_tokens / milliseconds / 1e3
        name = f"stream, {each} a chunk"
        print(f"{name:24s} {milliseconds:8.2f} ms {megabytes:8.2f} MB {rate:8.2f} M tokens/s")
        chunks = [block.removeprefix(b"data: ") for block in stream.split(b"\n\n") if b'"id"' in block]
        milliseconds, megabytes = measure(lambda chunks=chunks: decode_each(chunks))  # type: ignore[misc]
        rate = num_tokens / milliseconds / 1e3
        print(f"{'  its chunks decoded':24s} {milliseconds:8.2f} ms {'':11s} {rate:8.2f} M tokens/s")


if __name__ == "__main__":
    main()
