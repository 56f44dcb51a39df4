"""`audit` and `convert` over recorded exchanges of SGLang and Fireworks.

Nobody recorded those engines here. Their replies are written by hand round tokens and logprobs that another
engine recorded of the same weights, so that the trainer's own logprobs say whether they were read rightly.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from rlbatch.cli.app import app
from rlbatch.storage import open_reader

NUM_ROWS = 6
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
FINISH = {"stop": {"type": "stop", "matched": None}, "length": {"type": "length", "length": 64}}


def rlbatch(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def rows(data_dir: Path) -> list[dict[str, Any]]:
    return json.loads((data_dir / "rollouts" / "fp32_raw__t1.json").read_text())["rows"][:NUM_ROWS]


def sglang(row: dict[str, Any]) -> dict[str, Any]:
    triples = [[value, token_id, None] for value, token_id in zip(row["lp"], row["ids"], strict=True)]
    finish = dict(FINISH[row["finish_reason"]])
    if "matched" in finish:
        finish["matched"] = row["ids"][-1]
    meta = {"id": "1", "finish_reason": finish, "output_token_logprobs": triples}
    meta |= {"prompt_tokens": len(row["prompt_ids"]), "completion_tokens": len(row["ids"])}
    return {
        "endpoint": "/generate",
        "request": {
            "input_ids": row["prompt_ids"],
            "sampling_params": dict(SAMPLING),
            "return_logprob": True,
        },
        "status": 200,
        "response": {"text": row["text"], "output_ids": row["ids"], "meta_info": meta},
    }


def fireworks(row: dict[str, Any]) -> dict[str, Any]:
    content = [
        {"token_id": token_id, "logprob": value}
        for value, token_id in zip(row["lp"], row["ids"], strict=True)
    ]
    choice = {"index": 0, "text": row["text"], "finish_reason": row["finish_reason"]}
    choice |= {"token_ids": row["ids"], "logprobs": {"content": content}}
    return {
        "endpoint": "/inference/v1/completions",
        "request": {"prompt": row["prompt_ids"], "logprobs": True} | SAMPLING,
        "status": 200,
        "response": {"id": "1", "choices": [choice]},
    }


MAKERS = {"sglang": sglang, "fireworks": fireworks}


def written(path: Path, engine: str, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(MAKERS[engine](row)) + "\n" for row in rows))
    return path


def streamed(exchange: dict[str, Any]) -> dict[str, Any]:
    """The same reply as the one event of a stream."""
    data = json.dumps(exchange.pop("response"))
    if exchange["endpoint"] != "/generate":
        whole = json.loads(data)
        num = len(whole["choices"][0]["token_ids"])
        data = json.dumps(whole | {"usage": {"completion_tokens": num}})
    exchange["request"] = exchange["request"] | {"stream": True}
    return exchange | {"sse": f"data: {data}\n\ndata: [DONE]\n\n"}


@pytest.mark.parametrize("engine", MAKERS)
def test_recorded_exchanges_are_audited_against_the_model(
    engine: str, rows: list[dict[str, Any]], tinylm_dir: Path, tmp_path: Path
) -> None:
    path = written(tmp_path / f"{engine}.jsonl", engine, rows)
    flags = ("--engine", engine, "--logprobs-mode", "raw")
    result = rlbatch("audit", path, "--model", tinylm_dir, *flags)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("sound: ")


@pytest.mark.parametrize("engine", MAKERS)
def test_a_shift_in_them_is_found(
    engine: str, rows: list[dict[str, Any]], tinylm_dir: Path, tmp_path: Path
) -> None:
    for row in rows:
        row["lp"] = [row["lp"][-1], *row["lp"][:-1]]
    path = written(tmp_path / f"{engine}.jsonl", engine, rows)
    flags = ("--engine", engine, "--logprobs-mode", "raw")
    result = rlbatch("audit", path, "--model", tinylm_dir, *flags)
    assert result.exit_code == 1
    assert "[shifted]" in result.stdout


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engine", MAKERS)
def test_recorded_exchanges_are_converted_as_they_are(
    engine: str, stream: bool, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / f"{engine}.jsonl"
    exchanges = [streamed(MAKERS[engine](row)) if stream else MAKERS[engine](row) for row in rows]
    path.write_text("".join(json.dumps(each) + "\n" for each in exchanges))
    flags = ("--engine", engine, "--logprobs-mode", "raw")
    result = rlbatch("convert", path, "--out", tmp_path / "out", *flags)
    assert result.exit_code == 0, result.output
    stored = list(open_reader(tmp_path / "out"))
    assert len(stored) == NUM_ROWS
    for made, row in zip(stored, rows, strict=True):
        assert made.token_ids.tolist() == row["prompt_ids"] + row["ids"]
        drawn = made.inference_logprobs[len(row["prompt_ids"]) :]
        assert np.array_equal(drawn, np.array(row["lp"], np.float32))
        assert made.provenances[0].engine == engine


@pytest.mark.parametrize("engine", MAKERS)
def test_another_engine_than_the_endpoints_is_refused(
    engine: str, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = written(tmp_path / "one.jsonl", engine, rows)
    result = rlbatch("convert", path, "--out", tmp_path / "out", "--engine", "vllm", "--logprobs-mode", "raw")
    assert result.exit_code != 0
    assert "[statement-contradicted]" in result.output
    assert f"state --engine {engine}" in result.output


@pytest.mark.parametrize("engine", MAKERS)
def test_what_neither_file_nor_flag_states_is_asked_for(
    engine: str, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    exchange = MAKERS[engine](rows[0])
    fields = exchange["request"].get("sampling_params", exchange["request"])
    for name in SAMPLING:
        fields.pop(name)
    path = tmp_path / "one.json"
    path.write_text(json.dumps(exchange))
    result = rlbatch("convert", path, "--out", tmp_path / "out")
    assert result.exit_code != 0
    for flag in ("--engine", "--logprobs-mode", "--temperature", "--top-p", "--min-p"):
        assert flag in result.output
    flags = ["--engine", engine, "--logprobs-mode", "raw"]
    for name, value in SAMPLING.items():
        flags += ["--" + name.replace("_", "-"), str(value)]
    assert rlbatch("convert", path, "--out", tmp_path / "out", *flags).exit_code == 0


def test_parameters_of_each_prompt_and_least_tokens_of_sglang(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    exchange = sglang(rows[0])
    flags = ("--engine", "sglang", "--logprobs-mode", "raw")
    path = tmp_path / "one.json"
    exchange["request"]["sampling_params"] = [SAMPLING]
    path.write_text(json.dumps(exchange))
    assert "`sampling_params`" in rlbatch("convert", path, "--out", tmp_path / "out", *flags).output
    exchange["request"]["sampling_params"] = SAMPLING | {"min_new_tokens": 2, "regex": "a+"}
    path.write_text(json.dumps(exchange))
    assert rlbatch("convert", path, "--out", tmp_path / "out", *flags).exit_code == 0
    (made,) = open_reader(tmp_path / "out")
    assert made.provenances[0].sampling.min_tokens == 2
    assert made.provenances[0].sampling.structured_output is True
