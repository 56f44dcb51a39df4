"""Replies of SGLang and Fireworks, written by hand from their documents: nobody recorded real ones here.

Five tokens answer a prompt of four. The values are exact in float32, so that a test can compare them with
`==`. Every function gives new objects: a test may break what it gets.
"""

import base64
import math
from typing import Any

import numpy as np

PROMPT = [1, 315, 30, 579]
IDS = [572, 423, 331, 448, 4]
RAW = [-2.5, -0.25, -0.0078125, 0.0, -1.5]
SAMPLED = [-2.0, -0.125, -0.00390625, 0.0, -1.25]
ROUTING_SHAPE = (3, 2)
"""Layers and experts a token of the routing matrices."""
TEXTS = [" Chen", " starts", " with", " 12", "<|im_end|>"]


# -- SGLang -------------------------------------------------------------------------------------------------


def sglang_request(**changes: Any) -> dict[str, Any]:
    """A request of ids for logprobs, sampled from the plain softmax."""
    return {
        "input_ids": list(PROMPT),
        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8},
        "return_logprob": True,
    } | changes


def sglang_reply(ids: list[int] | None = None, logprobs: list[float] | None = None) -> dict[str, Any]:
    """One completion, ended by its stop token."""
    ids = list(IDS if ids is None else ids)
    logprobs = list(SAMPLED if logprobs is None else logprobs)
    return {
        "text": " Chen starts with 12",
        "output_ids": ids,
        "meta_info": {
            "id": "5f1c",
            "finish_reason": {"type": "stop", "matched": ids[-1]} if ids else {"type": "length", "length": 0},
            "prompt_tokens": len(PROMPT),
            "weight_version": "step-3",
            "input_token_logprobs": [[None, PROMPT[0], None], *[[-1.0, each, None] for each in PROMPT[1:]]],
            "output_token_logprobs": [[a, b, None] for a, b in zip(logprobs, ids, strict=True)],
            "output_token_logprobs_length": len(ids),
            "output_top_logprobs": [
                [[a, b, None], [a - 1.0, b + 1, None]] for a, b in zip(logprobs, ids, strict=True)
            ],
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "e2e_latency": 0.03,
        },
    }


def sglang_chunks(
    *, incremental: bool, sizes: tuple[int, ...] = (1, 3, 5), index: int | None = None
) -> list[Any]:
    """The events of the same completion as a stream, after as many tokens as `sizes` says."""
    events: list[Any] = []
    before = 0
    for size in sizes:
        whole = sglang_reply()
        start = before if incremental else 0
        meta = whole["meta_info"]
        chunk = {
            "text": "".join(TEXTS[start:size]),
            "output_ids": IDS[start:size],
            "meta_info": meta
            | {
                "finish_reason": meta["finish_reason"] if size == len(IDS) else None,
                "output_token_logprobs": meta["output_token_logprobs"][start:size],
                "output_top_logprobs": meta["output_top_logprobs"][start:size],
                "output_token_logprobs_length": size,
                "completion_tokens": size,
            },
        }
        if index is not None:
            chunk["index"] = index
            chunk["meta_info"]["id"] = f"5f1c_{index}"
        events.append(chunk)
        before = size
    return events


# -- Fireworks ----------------------------------------------------------------------------------------------


def fireworks_request(**changes: Any) -> dict[str, Any]:
    """A request of ids for logprobs, sampled from the plain softmax."""
    return {
        "model": "accounts/a/deployments/d",
        "prompt": list(PROMPT),
        "n": 1,
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "logprobs": True,
        "raw_output": True,
        "return_token_ids": True,
    } | changes


def fireworks_entries() -> list[dict[str, Any]]:
    """`content`: one entry a token, the raw and the sampled logprob side by side."""
    return [
        {
            "token": text,
            "token_id": token_id,
            "logprob": raw,
            "sampling_logprob": sampled,
            "bytes": list(text.encode()),
            "text_offset": sum(map(len, TEXTS[:at])),
            "top_logprobs": [{"token": text, "token_id": token_id, "logprob": raw, "bytes": []}],
            "routing_matrix": "",
        }
        for at, (text, token_id, raw, sampled) in enumerate(zip(TEXTS, IDS, RAW, SAMPLED, strict=True))
    ]


def fireworks_reply() -> dict[str, Any]:
    """One choice that says its ids three times and its prompt twice."""
    return {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 1,
        "model": "accounts/a/deployments/d",
        "choices": [
            {
                "index": 0,
                "text": " Chen starts with 12",
                "finish_reason": "stop",
                "logprobs": {"content": fireworks_entries()},
                "token_ids": list(IDS),
                "prompt_token_ids": list(PROMPT),
                "raw_output": {
                    "prompt_fragments": list(PROMPT),
                    "prompt_token_ids": list(PROMPT),
                    "completion": "".join(TEXTS),
                    "completion_token_ids": list(IDS),
                },
            }
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9},
    }


def fireworks_legacy() -> dict[str, Any]:
    """The older form: parallel lists, which name no sampled logprobs."""
    body = fireworks_reply()
    body["choices"][0]["logprobs"] = {
        "tokens": list(TEXTS),
        "token_logprobs": list(RAW),
        "token_ids": list(IDS),
        "top_logprobs": [{text: raw} for text, raw in zip(TEXTS, RAW, strict=True)],
        "text_offset": [0, 5, 12, 17, 20],
    }
    return body


def fireworks_echo(last: int | None = None) -> dict[str, Any]:
    """The reply to echo (all of the prompt, its first row null) or echo_last."""
    body = fireworks_reply()
    choice = body["choices"][0]
    echoed = PROMPT if last is None else PROMPT[len(PROMPT) - last :]
    rows = [
        {
            "token": "p",
            "token_id": each,
            "logprob": -1.0,
            "sampling_logprob": None,
            "bytes": [],
            "text_offset": 0,
        }
        for each in echoed
    ]
    if last is None:
        rows[0]["logprob"] = None
    choice["logprobs"]["content"] = rows + choice["logprobs"]["content"]
    choice["token_ids"] = [*echoed, *IDS]
    choice["raw_output"]["completion_token_ids"] = [*echoed, *IDS]
    return body


def fireworks_chunks(sizes: tuple[int, ...] = (1, 3, 5)) -> list[Any]:
    """The events of the same reply as a stream; raw_output and usage come with the last."""
    events: list[Any] = []
    before = 0
    for size in sizes:
        whole = fireworks_reply()
        choice = whole["choices"][0]
        last = size == len(IDS)
        choice |= {
            "text": "".join(TEXTS[before:size]),
            "finish_reason": "stop" if last else None,
            "logprobs": {"content": choice["logprobs"]["content"][before:size]},
            "token_ids": IDS[before:size],
            "prompt_token_ids": list(PROMPT) if not before else None,
            "raw_output": choice["raw_output"] if last else None,
        }
        whole["usage"] = whole["usage"] if last else None
        events.append(whole)
        before = size
    return events


def fireworks_matrix(token: int, dtype: str = "|u1") -> str:
    """The pass that drew token `token` of prompt and completion: no two elements of any two are the same."""
    experts = range(10 * token, 10 * token + math.prod(ROUTING_SHAPE))
    return base64.b64encode(np.array(experts, dtype).tobytes()).decode()


def fireworks_routed(num_echoed: int | None = None, dtype: str = "|u1") -> dict[str, Any]:
    """A matrix for each token but the first of all, whose pass nothing came before."""
    whole = num_echoed is not None and num_echoed >= len(PROMPT)
    body = fireworks_reply() if num_echoed is None else fireworks_echo(None if whole else num_echoed)
    rows = body["choices"][0]["logprobs"]["content"]
    first = len(PROMPT) + len(IDS) - len(rows)
    for token, row in enumerate(rows, first):
        row["routing_matrix"] = fireworks_matrix(token, dtype) if token else ""
    return body
