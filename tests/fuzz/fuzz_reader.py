"""What a reply says, read a second time by code that shares nothing with the parsers.

`says` walks plain JSON and compares everything that a reply repeats. It answers with each choice's prompt,
ids and logprobs; `UnsaidError` means that the reply is not whole, or disagrees with itself or its request.
Each engine takes about thirty lines; a stream (the list of its events) is put together first.
"""

import base64
import io
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

FINISH = ("stop", "length", "abort", "tool_calls")


class UnsaidError(Exception):
    """No exact tokens can be read from this."""


class Said(NamedTuple):
    """One choice."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    finish: str
    routing: Any = None
    """[rows, L, K] where the reply has it."""


def says(engine: str, payload: Any, request: dict[str, Any]) -> list[Said]:
    """The choices of a reply, in order of their index."""
    try:
        # What JSON makes of it: a tuple is a list, a key is text.
        payload = json.loads(json.dumps(payload))
        if request.get("stream"):
            payload = STREAMS[engine](payload)
        return [whole(*parts) for parts in READERS[engine](payload, request)]
    except UnsaidError:
        raise
    except Exception as error:
        # Whatever breaks this plain walk is no whole reply.
        raise UnsaidError(f"{type(error).__name__}: {error}") from error


def need(truth: bool, what: str) -> None:
    if not truth:
        raise UnsaidError(what)


def agree(*statements: Any) -> Any:
    """What all of them say; those that are None say nothing."""
    made = [each for each in statements if each is not None]
    need(bool(made), "nobody says it")
    need(all(each == made[0] for each in made), "two statements disagree")
    return made[0]


def whole(prompt: Any, ids: Any, logprobs: Any, finish: Any, routing: Any = None) -> Said:
    """One choice whose lists are what they must be."""
    for each in (*prompt, *ids):
        need(type(each) is int and 0 <= each < 2**31, "an id that is no id")
    need(len(prompt) > 0 and len(ids) == len(logprobs), "uneven lists")
    for each in logprobs:
        need(type(each) in (int, float) and math.isfinite(np.float32(each)), "a logprob that is none")
    need(isinstance(finish, str) and finish in FINISH, "no known end")
    return Said(list(prompt), list(ids), list(logprobs), finish, routing)


def count(usage: Any, prompts: list[Any], completions: list[Any]) -> None:
    """The counts of a `usage` object, where it is there and says them."""
    usage = {} if usage is None else usage
    num_prompt, num_completion = sum(map(len, prompts)), sum(map(len, completions))
    agree(num_prompt, usage.get("prompt_tokens"))
    agree(num_completion, usage.get("completion_tokens"))
    agree(num_prompt + num_completion, usage.get("total_tokens"))


def routed(text: Any) -> Any:
    """The array in base64 of an npy file, as numpy reads it."""
    if text is None:
        return None
    array = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    need(array.ndim == 3 and array.dtype.kind in "ui" and (array >= 0).all(), "no record of experts")
    return array


def spelt(name: Any) -> int | None:
    """The id in "token_id:572"; None where the name is the token's own text."""
    return int(name.removeprefix("token_id:")) if str(name).startswith("token_id:") else None


def among_its_own(tops: Any, names: list[Any], values: list[Any], asked: Any) -> None:
    """Alternatives by text have the drawn token's logprob, unless another of its text has its key."""
    if tops is None:
        return
    agree(len(values), len(tops))
    for name, value, top in zip(names, values, tops, strict=bool(names)):
        need(value is None or (top is not None and name in top), "a token that is not among its own")
        shared = spelt(name) is None and value is not None and len(top) <= asked
        need(value is None or top[name] == value or shared, "two logprobs")


# -- vLLM ---------------------------------------------------------------------------------------------------


def vllm(body: Any, request: dict[str, Any]) -> list[tuple[Any, ...]]:
    fields = request.get("sampling_params", request)
    sent = request.get("token_ids", request.get("prompt"))
    sent = sent if isinstance(sent, list) and sent and isinstance(sent[0], list) else [sent]
    each = fields.get("n") or 1
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    agree(list(range(each * len(sent))), [choice["index"] for choice in choices])
    found, counted = [], []
    for choice, asked in zip(choices, [ids for ids in sent for _ in range(each)], strict=True):
        asked = asked if isinstance(asked, list) else None
        prompt = agree(body.get("prompt_token_ids"), choice.get("prompt_token_ids"), asked)
        lists = {} if choice.get("logprobs") is None else choice["logprobs"]
        rows = lists.get("content")
        values = lists.get("token_logprobs") if rows is None else [row["logprob"] for row in rows]
        names = lists.get("tokens") if rows is None else [row.get("token") for row in rows]
        values, names = values or [], names or []
        among_its_own(lists.get("top_logprobs"), names, values, fields.get("logprobs"))
        ids = choice.get("token_ids")
        # vLLM draws one token that max_tokens=0 did not ask for.
        unasked = int(bool(request.get("echo")) and fields.get("max_tokens") == 0)
        if request.get("echo"):
            need(values[0] is None, "an echo begins with null")
            ids = [] if unasked else ids
            values, names = values[len(prompt) :], names[len(prompt) :]
        by_name = [spelt(name) for name in names]
        by_row = [row.get("token_id") for row in rows or ()]
        ids = agree(
            ids,
            by_name if any(each is not None for each in by_name) else None,
            by_row if any(by_row) else None,
        )
        for row in rows or ():
            for other in row.get("top_logprobs") or ():
                if other.get("token_id") is not None and other["token_id"] == row.get("token_id"):
                    agree(row["logprob"], other["logprob"])
        at = 0
        for span in choice.get("weight_versions") or ():
            agree(at, span["start"])
            need(type(span["end"]) is int and span["end"] >= at, "a span that runs backwards")
            at = span["end"]
        agree(len(ids), at if choice.get("weight_versions") else None)
        if type(choice.get("stop_reason")) is int:
            agree(ids[-1], choice["stop_reason"])
        need(len(ids) <= fields.get("max_tokens", len(ids)), "more than was asked for")
        routing, drawn = routed(choice.get("routed_experts")), choice["token_ids"] if unasked else ids
        if routing is not None:
            start = fields.get("routed_experts_prompt_start") or 0
            agree(len(prompt) + len(drawn) - 1 - start, len(routing))
            routing = routing[: len(routing) - unasked]
        found.append((prompt, ids, values, choice["finish_reason"], routing))
        counted.append((prompt, drawn))
    count(
        body.get("usage"),
        [each[0] for each in counted][:: len(choices) // len(sent)],
        [e[1] for e in counted],
    )
    return found


def vllm_stream(events: list[Any]) -> Any:
    need(events[-1] == "[DONE]" and "[DONE]" not in events[:-1], "the stream does not end once, at its end")
    body: dict[str, Any] = {"choices": {}, "prompt_token_ids": None, "usage": None}
    for event in events[:-1]:
        agree(*[each.get("id", each.get("request_id")) for each in (event, events[0])])
        body["prompt_token_ids"] = event.get("prompt_token_ids") or body["prompt_token_ids"]
        body["usage"] = event.get("usage") or body["usage"]
        for part in event["choices"]:
            choice = body["choices"].setdefault(part["index"], {"logprobs": {}, "finish_reason": None})
            need(choice["finish_reason"] is None, "a chunk after the end")
            for name in ("token_ids", "prompt_token_ids"):
                choice[name] = (choice.get(name) or []) + (part.get(name) or []) or choice.get(name)
            for name in ("content", "token_logprobs", "tokens", "top_logprobs"):
                new = (part.get("logprobs") or {}).get(name)
                if new is not None:
                    choice["logprobs"][name] = choice["logprobs"].get(name, []) + new
            last = ("index", "finish_reason", "stop_reason", "weight_versions")
            choice |= {name: part.get(name) for name in last}
            choice["routed_experts"] = part.get("routed_experts") or choice.get("routed_experts")
    body["choices"] = list(body["choices"].values())
    return body


# -- SGLang -------------------------------------------------------------------------------------------------


def sglang(body: Any, request: dict[str, Any]) -> list[tuple[Any, ...]]:
    replies = body if isinstance(body, list) else [body]
    agree(len(replies), request["sampling_params"].get("n") or 1)
    found = []
    for reply in replies:
        meta = reply["meta_info"]
        rows, inputs = meta.get("output_token_logprobs"), meta.get("input_token_logprobs") or []
        tops = meta.get("output_top_logprobs")
        beside = (
            None
            if rows is None or any(len(row) < 2 or row[1] is None for row in rows)
            else [r[1] for r in rows]
        )
        ids = agree(reply.get("output_ids"), beside)
        scored = [row[1] for row in inputs]
        alone = scored if inputs and len(inputs) == meta.get("prompt_tokens") else None
        prompt = agree(reply.get("prompt_token_ids"), request.get("input_ids"), alone)
        agree(scored, prompt[len(prompt) - len(scored) :])
        agree(len(prompt), meta.get("prompt_tokens"))
        agree(len(ids), meta.get("completion_tokens"), meta.get("output_token_logprobs_length"))
        agree(len(ids), len(tops) if tops else None)
        for row, top in zip(rows or [], tops or [], strict=bool(tops)):
            for other in top or ():
                need(other[1:2] != row[1:2] or other[1:2] == [None] or other[0] == row[0], "two logprobs")
        finish = meta["finish_reason"]
        if type(finish.get("matched")) is int:
            agree(ids[-1], finish["matched"])
        need(
            len(ids) <= request["sampling_params"].get("max_new_tokens", len(ids)), "more than was asked for"
        )
        found.append((prompt, ids, [row[0] for row in rows or []], finish["type"]))
    return found


def sglang_stream(events: list[Any]) -> Any:
    need(events[-1] == "[DONE]" and "[DONE]" not in events[:-1], "the stream does not end once, at its end")
    replies: dict[int, Any] = {}
    for event in events[:-1]:
        index, meta = event.get("index") or 0, event["meta_info"]
        held = replies.get(index)
        if held is None:
            replies[index] = held = event
        else:
            before = held["meta_info"]
            need(before.get("finish_reason") is None, "a chunk after the end")
            agree(before.get("id"), meta.get("id"))
            num = agree(meta.get("completion_tokens"), meta.get("output_token_logprobs_length"))
            for old, new, name in (
                (held, event, "output_ids"),
                (before, meta, "output_token_logprobs"),
                (before, meta, "output_top_logprobs"),
            ):
                had, has = old.get(name) or [], new.get(name) or []
                new[name] = had + has if num > len(has) else has
                if name != "output_top_logprobs":
                    for a, b in zip(had, new[name], strict=False):
                        agree(*(each[:2] if isinstance(each, list) else each for each in (a, b)))
            replies[index] = event
    agree(list(range(len(replies))), sorted(replies))
    return [replies[index] for index in sorted(replies)]


# -- Fireworks ----------------------------------------------------------------------------------------------


def fireworks(body: Any, request: dict[str, Any]) -> list[tuple[Any, ...]]:
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    agree(list(range(request.get("n") or 1)), [choice["index"] for choice in choices])
    found = []
    for choice in choices:
        raw_output = choice.get("raw_output") or {}
        rows = choice["logprobs"]["content"]
        beside = [row.get("token_id") for row in rows]
        beside = None if rows and not any(each is not None for each in beside) else beside
        ids = agree(choice.get("token_ids"), raw_output.get("completion_token_ids"), beside)
        prompt = agree(
            choice.get("prompt_token_ids"),
            body.get("prompt_token_ids"),
            raw_output.get("prompt_token_ids"),
            request["prompt"],
        )
        for row in rows:
            for other in row.get("top_logprobs") or ():
                if other.get("token_id") is not None and other["token_id"] == row.get("token_id"):
                    need(other.get("logprob") == row.get("logprob"), "two logprobs")
        num = min(request.get("echo_last", len(prompt)), len(prompt)) if request.get("echo") else 0
        agree(ids[:num], prompt[len(prompt) - num :])
        need(len(ids) - num <= request.get("max_tokens", len(ids)), "more than was asked for")
        lists = (prompt, ids[num:], [row["sampling_logprob"] for row in rows[num:]])
        found.append((*lists, choice["finish_reason"], matrices(rows, len(prompt), num)))
    count(body.get("usage"), [each[0] for each in found], [each[1] for each in found])
    return found


def matrices(rows: list[Any], num_prompt: int, num_echoed: int) -> Any:
    """The experts of each pass that drew a token, a byte each; only echoed tokens may lack them, in front."""
    texts = [row.get("routing_matrix") or "" for row in rows]
    if not any(texts):
        return None
    first = next(at for at, text in enumerate(texts) if text)
    need(first <= num_echoed and all(texts[first:]), "a drawn token without its matrix")
    need(num_prompt - num_echoed + first > 0, "a matrix of a pass before the first token")
    return np.stack(
        [np.frombuffer(base64.b64decode(text, validate=True), "u1").reshape(3, 2) for text in texts[first:]]
    )


def fireworks_stream(events: list[Any]) -> Any:
    need(events[-1] == "[DONE]" and "[DONE]" not in events[:-1], "the stream does not end once, at its end")
    whole: dict[int, Any] = {}
    for event in events[:-1]:
        need(event.get("id") == events[0].get("id"), "a chunk of another reply")
        for part in event["choices"]:
            held = whole.setdefault(part["index"], {"token_ids": None, "logprobs": {"content": []}})
            need(held.get("finish_reason") is None, "a chunk after the end")
            rows = (part.get("logprobs") or {}).get("content") or []
            ids = part.get("token_ids")
            held["logprobs"] = {"content": held["logprobs"]["content"] + rows}
            held["token_ids"] = held["token_ids"] if ids is None else (held["token_ids"] or []) + ids
            held |= {"index": part["index"], "finish_reason": part.get("finish_reason")}
            for name in ("prompt_token_ids", "raw_output"):
                held[name] = held.get(name) if part.get(name) is None else part[name]
    usage = [event["usage"] for event in events[:-1] if event.get("usage") is not None]
    return {"choices": list(whole.values()), "usage": usage[-1] if usage else None}


READERS: dict[str, Callable[..., list[tuple[Any, ...]]]] = {
    "vllm": vllm,
    "sglang": sglang,
    "fireworks": fireworks,
}
STREAMS: dict[str, Callable[[list[Any]], Any]] = {
    "vllm": vllm_stream,
    "sglang": sglang_stream,
    "fireworks": fireworks_stream,
}
