"""The replies that are damaged: every recorded one that holds sampled tokens, and those written by hand."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import replies_by_hand

from rlbatch.records import Provenance, SamplingParams

TESTS = Path(__file__).parent.parent
VLLM = TESTS / "data" / "vllm-0.32.0" / "replies"
MOE = TESTS / "data" / "moe-vllm-0.32.0" / "replies"


class Seed(NamedTuple):
    """One reply with its request: a tree, or the list of its events where it was streamed."""

    name: str
    engine: str
    tree: Any
    request: dict[str, Any]
    provenance: Provenance

    @property
    def streamed(self) -> bool:
        return bool(self.request.get("stream"))


def events_of(sse: str) -> list[Any]:
    """The data of a stream's events, decoded; the end marker stays text."""
    found = [line.removeprefix("data: ") for line in sse.splitlines() if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in found]


def sse_of(events: list[Any]) -> str:
    """The stream that a server would send."""
    return "".join(f"data: {each if each == '[DONE]' else json.dumps(each)}\n\n" for each in events)


def provenance_of(engine: str, request: dict[str, Any]) -> Provenance:
    """What the request asked for; the values count as processed, so that they are `inference_logprobs`."""
    fields = request.get("sampling_params") or request
    sampling = SamplingParams(
        temperature=fields.get("temperature", 1.0),
        top_p=fields.get("top_p", 1.0),
        top_k=max(fields.get("top_k", 0), 0),
        min_p=fields.get("min_p", 0.0),
        repetition_penalty=fields.get("repetition_penalty", 1.0),
        logit_bias="logit_bias" in fields,
        allowed_token_ids="allowed_token_ids" in fields,
        bad_words="bad_words" in fields,
        min_tokens=fields.get("min_tokens", 0),
        structured_output=fields.get("tool_choice") == "required",
    )
    return Provenance(engine=engine, logprobs_mode="processed", sampling=sampling)


def seed(name: str, engine: str, tree: Any, request: dict[str, Any]) -> Seed:
    return Seed(name, engine, tree, request, provenance_of(engine, request))


def vllm_seeds() -> list[Seed]:
    """Every recorded reply of the real engine whose request could be answered with tokens."""
    found = []
    for path in sorted([*VLLM.rglob("*.json"), *MOE.rglob("*.json")]):
        name = path.relative_to(TESTS / "data").as_posix()
        recording = json.loads(path.read_text(encoding="utf-8"))
        if "turns" in recording:
            pairs = [pair[turn] for pair in recording["turns"] for turn in ("turn1", "turn2")]
        else:
            pairs = [recording]
        for pair in pairs:
            tree = events_of(pair["sse"]) if "sse" in pair else pair.get("response")
            if isinstance(tree, list) or (isinstance(tree, dict) and "choices" in tree):
                found.append(seed(name, "vllm", tree, pair["request"]))
    return found


def hand_seeds() -> list[Seed]:
    """Replies of the engines of which no recording exists."""
    found = []
    ask = replies_by_hand.sglang_request
    reply = replies_by_hand.sglang_reply
    bare = reply()
    del bare["output_ids"]
    with_prompt = reply() | {"prompt_token_ids": list(replies_by_hand.PROMPT)}
    twice = ask(sampling_params={"temperature": 1.0, "n": 2})
    for name, tree, request in (
        ("whole", reply(), ask()),
        ("rows only", bare, ask()),
        ("empty", reply([], []), ask()),
        ("prompt in the reply", with_prompt, ask(input_ids=None, text="x")),
        ("n=2", [reply(), reply()], twice),
    ):
        found.append(seed(f"sglang {name}", "sglang", tree, request))
    for incremental in (False, True):
        chunks = replies_by_hand.sglang_chunks(incremental=incremental)
        found.append(seed(f"sglang {incremental=}", "sglang", [*chunks, "[DONE]"], ask(stream=True)))
    mixed = [
        chunk
        for pair in zip(
            *(replies_by_hand.sglang_chunks(incremental=True, index=at) for at in (0, 1)), strict=True
        )
        for chunk in pair
    ]
    found.append(seed("sglang n=2", "sglang", [*mixed, "[DONE]"], twice | {"stream": True}))
    ask = replies_by_hand.fireworks_request
    plain = replies_by_hand.fireworks_reply()
    del plain["choices"][0]["raw_output"], plain["choices"][0]["token_ids"]
    for name, tree, request in (
        ("whole", replies_by_hand.fireworks_reply(), ask()),
        ("content only", plain, ask()),
        ("echo_last", replies_by_hand.fireworks_echo(2), ask(echo=True, echo_last=2)),
        ("echo", replies_by_hand.fireworks_echo(), ask(echo=True)),
        ("stream", [*replies_by_hand.fireworks_chunks(), "[DONE]"], ask(stream=True)),
    ):
        found.append(seed(f"fireworks {name}", "fireworks", tree, request))
    for echo in ({}, {"echo": True}):
        tree = replies_by_hand.fireworks_routed(4 if echo else None)
        routed = seed("fireworks routed", "fireworks", tree, ask(include_routing_matrix=True, **echo))
        provenance = replace(routed.provenance, routing_shape=replies_by_hand.ROUTING_SHAPE)
        found.append(routed._replace(provenance=provenance))
    return found


def all_seeds() -> list[Seed]:
    """Seeds of every engine; those by hand come four times, because the recorded ones are many."""
    return vllm_seeds() + 4 * hand_seeds()
