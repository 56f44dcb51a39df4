"""Routed experts of a live vLLM server, end to end: reply, sample, shard, batch, and the trainer's gates.

Runs only when asked for (`pytest -m vllm`): `RLBATCH_VLLM_PYTHON` as for the other tests here, and
`RLBATCH_TRITON` names a folder with Triton in it (`pip install --no-deps --target FOLDER triton==3.8.0`).
"""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moe_routing import NUM_LAYERS, TOP_K, routing_of
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

HERE = Path(__file__).parent
MOE = HERE.parent / "data" / "moe-vllm-0.32.0"
STUB = HERE / "triton_stub"
ARGUMENTS = (
    *("--dtype", "float32", "--enable-scale-out", "--enable-return-routed-experts", "--block-size", "32"),
    *("--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager", "--seed", "0"),
)
NUM_CHOICES = 2
ROUTE = "/inference/v1/generate"
MAX_LOG_RATIO = 1e-4
"""Nats; both sides compute in float32."""
MIN_EQUAL = 0.995
"""Share of rows with the same experts: equal probabilities may be ranked either way."""
TOOL_IDS = [203, 3, 88, 203]
"""A tool's answer, of any tokens: nothing of it is sampled."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tinylm_dir: Path) -> Iterator[Server]:
    python, triton = os.environ.get("RLBATCH_VLLM_PYTHON"), os.environ.get("RLBATCH_TRITON")
    if python is None or triton is None:
        pytest.fail("RLBATCH_VLLM_PYTHON or RLBATCH_TRITON is not set: see the head of this file")
    base = tmp_path_factory.mktemp("moe")
    # The model's tokenizer is tinylm's.
    model = base / "tinymoe"
    shutil.copytree(tinylm_dir, model)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MOE / "tinymoe" / name, model / name)
    # Triton finds its backends by the metadata of installed packages.
    shutil.copytree(STUB, base / "packages" / "rlbatch_triton_stub")
    metadata = base / "packages" / "rlbatch_triton_stub-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rlbatch-triton-stub\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[triton.backends]\ncpu = rlbatch_triton_stub\n")
    environment = {"PYTHONPATH": f"{base / 'packages'}:{triton}", "TRITON_INTERPRET": "1"}
    with serving(python, model, base / "log.txt", arguments=ARGUMENTS, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(MOE / "tinymoe", device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [row["prompt_ids"] for row in json.loads((MOE / "rollouts.json").read_text())["rows"]]


def request_of(prompt: list[int], *, stream: bool, **changes: Any) -> dict[str, Any]:
    sampling = {
        "n": NUM_CHOICES,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "max_tokens": 24,
        "seed": 7,
        "logprobs": 0,
    }
    return {
        "model": "tinylm",
        "token_ids": prompt,
        "stream": stream,
        "sampling_params": sampling | changes,
    }


def send(server: Server, body: dict[str, Any]) -> list[Turn]:
    provenance = Provenance(engine="vllm", logprobs_mode="raw", sampling=SamplingParams(temperature=1.0))
    pieces = server.post(ROUTE, body)
    if not body["stream"]:
        return parse_response(b"".join(pieces), request=body, provenance=provenance)
    assembler = ResponseAssembler(request=body, provenance=provenance)
    for piece in pieces:
        assembler.feed(piece)
    return assembler.finish()


def judge(samples: list[Sample], model: PreTrainedModel, path: Path) -> None:
    """Through a shard and back: the experts are those of the trainer's gates, and the logprobs agree."""
    write_shard(path, samples)
    batch = collate(list(open_reader(path)), layout="padded")
    recorded = batch.routed_experts
    held = recorded[..., 0, 0] >= 0
    assert int(held.sum()) == sum(len(each.token_ids) - 1 for each in samples)
    equal = (routing_of(model, batch) == recorded)[held].flatten(1).all(1)
    assert equal.double().mean().item() >= MIN_EQUAL
    with torch.no_grad():
        logprobs = trainer_logprobs(model, batch)
    alignment = require_aligned(batch, logprobs, trainer_version=None)
    assert alignment.log_ratio[batch.loss_mask].abs().max().item() < MAX_LOG_RATIO


def test_routing_of_whole_and_streamed_replies_is_the_trainers(
    server: Server, model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    bodies = [request_of(prompt, stream=bool(at % 2)) for at, prompt in enumerate(prompts[:8])]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda body: send(server, body), bodies))
    samples = []
    for number, turns in enumerate(replies):
        assert len(turns) == NUM_CHOICES
        for index, turn in enumerate(turns):
            num_tokens = len(turn.prompt_token_ids) + len(turn.completion_token_ids)
            assert turn.routed_experts is not None
            assert turn.routed_experts.shape == (num_tokens - 1, NUM_LAYERS, TOP_K)
            samples += to_samples(Trajectory(trajectory_id=f"{number}.{index}", turns=(turn,), advantage=0.0))
    judge(samples, model, tmp_path / "moe.safetensors")


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_turn_goes_on_where_the_first_ones_rows_end(
    server: Server, model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path, stream: bool
) -> None:
    (first,) = send(server, request_of(prompts[3], stream=stream, n=1))
    known = [*first.prompt_token_ids.tolist(), *first.completion_token_ids.tolist()]
    # The rows that are held already: the last sampled token has none.
    start = {"routed_experts_prompt_start": len(known) - 1}
    prompt = [*known, *TOOL_IDS]
    (second,) = send(server, request_of(prompt, stream=stream, n=1, **start))
    assert second.routed_experts_start == len(known) - 1
    (sample,) = to_samples(Trajectory(trajectory_id="two", turns=(first, second), advantage=0.0))
    assert sample.routed_experts is not None
    assert len(sample.routed_experts) == len(sample.token_ids) - 1
    assert np.array_equal(sample.routed_experts[len(known) - 1 :], second.routed_experts)
    judge([sample], model, tmp_path / "two.safetensors")


def test_another_start_than_the_request_named_is_refused(server: Server, prompts: list[list[int]]) -> None:
    body = request_of(prompts[0], stream=False, n=1, routed_experts_prompt_start=5)
    reply = b"".join(server.post(ROUTE, body))
    del body["sampling_params"]["routed_experts_prompt_start"]
    provenance = Provenance(engine="vllm", logprobs_mode="raw", sampling=SamplingParams(temperature=1.0))
    with pytest.raises(ReplyError) as caught:
        parse_response(reply, request=body, provenance=provenance)
    assert caught.value.code == "routed-experts-mismatch"
