"""What the README shows works as it stands."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.errors import ReplyError, SoundnessError

README = (Path(__file__).parent.parent / "README.md").read_text()


def block(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, marker
    return found[1]


def run_loop(body, reply, tinylm_dir) -> dict[str, Any]:
    from rlbatch.scoring import load_model

    names = {
        "body": body,
        "reply": reply,
        "eos": (2, 4),
        "model": load_model(tinylm_dir, device="cpu", dtype=torch.float32),
        "advantages": [1.0, -1.0],
    }
    exec(compile(block("loop"), "README.md", "exec"), names)
    return names


def test_the_loop_in_the_readme_runs_and_gives_gradients(tmp_path, monkeypatch, data_dir, tinylm_dir):
    monkeypatch.chdir(tmp_path)
    recording = json.loads((data_dir / "replies/fp32_raw/completions_n2_t1.json").read_text())
    names = run_loop(recording["request"], recording["response"], tinylm_dir)
    model = names["model"]
    (batch,) = names["batches"]
    assert (batch.num_loss_tokens, batch.num_trajectories) == (16, 2)
    torch.testing.assert_close(names["ratio"], torch.ones_like(names["ratio"]), atol=1e-4, rtol=0)
    assert model.lm_head.weight.grad.abs().sum() > 0


def recorded_exchange(data_dir, *, num_lost: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A recorded row that ended with EOS, as its request and reply; the last tokens lost everywhere alike."""
    content = json.loads((data_dir / "rollouts/fp32_raw__t1.json").read_text())
    row = next(row for row in content["rows"] if row["finish_reason"] == "stop" and row["ids"][-1] == 2)
    stop = len(row["ids"]) - num_lost
    choice = {
        "index": 0,
        "text": "",
        "finish_reason": "stop",
        "stop_reason": None,
        "logprobs": {"token_logprobs": row["lp"][:stop], "tokens": ["x"] * stop},
        "token_ids": row["ids"][:stop],
        "prompt_token_ids": row["prompt_ids"],
    }
    reply = {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": "tinylm",
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(row["prompt_ids"]),
            "completion_tokens": stop,
            "total_tokens": len(row["prompt_ids"]) + stop,
        },
    }
    body = {"prompt": row["prompt_ids"], "temperature": 1.0, "return_token_ids": True, "logprobs": 0}
    return body, reply


def test_the_loop_in_the_readme_trains_a_whole_rollout(tmp_path, monkeypatch, data_dir, tinylm_dir):
    monkeypatch.chdir(tmp_path)
    body, reply = recorded_exchange(data_dir, num_lost=0)
    (batch,) = run_loop(body, reply, tinylm_dir)["batches"]
    assert batch.num_loss_tokens == reply["usage"]["completion_tokens"]


def test_the_loop_in_the_readme_refuses_a_lost_eos(tmp_path, monkeypatch, data_dir, tinylm_dir):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SoundnessError) as caught:
        run_loop(*recorded_exchange(data_dir, num_lost=1), tinylm_dir)
    assert [found.code for found in caught.value.findings] == ["finish-mismatch"]


def test_the_loop_in_the_readme_refuses_another_request(tmp_path, monkeypatch, data_dir, tinylm_dir):
    monkeypatch.chdir(tmp_path)
    recording = json.loads((data_dir / "replies/fp32_raw/completions_ids_lp1_t1_topp05.json").read_text())
    with pytest.raises(ReplyError, match=r"the request sent top_p=0.5"):
        run_loop(recording["request"], recording["response"], tinylm_dir)


def test_it_is_short_and_its_commands_are_marked():
    assert len(README.splitlines()) < 200
    for marker in ("audit", "tests"):
        assert block(marker).count("\n") == 1
