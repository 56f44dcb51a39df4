"""Samples with vLLM in this process, no server, and writes what it said as recorded replies.

    VENV/bin/python sample.py MODEL_DIR LOGPROBS_MODE PROMPTS.json OUT_DIR TEMPERATURE...

PROMPTS.json is a list of lists of token ids. For each temperature OUT_DIR/t<temperature>.jsonl is written, a
line a prompt: {endpoint, request, status, response}, as a server of the same engine would have answered
/inference/v1/generate. Runs under the engine's own interpreter and imports nothing of rlbatch.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# The engine reads these when it is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

from vllm import LLM, SamplingParams

COMPLETIONS_PER_PROMPT = 2


def sampling_fields(temperature: float, seed: int) -> dict[str, Any]:
    """Every field that shapes the distribution, by name: a model's generation_config must not set any."""
    return {
        "n": COMPLETIONS_PER_PROMPT,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "max_tokens": 64,
        "seed": seed,
        "logprobs": 0,
    }


def choice(output: Any) -> dict[str, Any]:
    """One completion as the route spells it: an entry of `content` a sampled token, in order."""
    ids = list(output.token_ids)
    content = [
        {"token_id": token_id, "logprob": entry[token_id].logprob}
        for token_id, entry in zip(ids, output.logprobs, strict=True)
    ]
    return {
        "index": output.index,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "token_ids": ids,
        "logprobs": {"content": content},
    }


def exchange(model: str, prompt: list[int], fields: dict[str, Any], result: Any) -> dict[str, Any]:
    """A request and its reply."""
    return {
        "endpoint": "/inference/v1/generate",
        "request": {"model": model, "token_ids": prompt, "sampling_params": fields},
        "status": 200,
        "response": {
            "request_id": result.request_id,
            "model": model,
            "prompt_token_ids": list(result.prompt_token_ids),
            "choices": [choice(output) for output in result.outputs],
        },
    }


def main() -> None:
    """Start the engine once, then one file a temperature."""
    model, logprobs_mode, prompts_path, out, *temperatures = sys.argv[1:]
    prompts = json.loads(Path(prompts_path).read_text())
    llm = LLM(
        model,
        dtype="float32",
        logprobs_mode=logprobs_mode,
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        seed=0,
    )
    for temperature in temperatures:
        fields = [sampling_fields(float(temperature), seed) for seed in range(len(prompts))]
        results = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(**each) for each in fields],
            use_tqdm=False,
        )
        lines = [
            json.dumps(exchange(Path(model).name, *parts))
            for parts in zip(prompts, fields, results, strict=True)
        ]
        (Path(out) / f"t{temperature}.jsonl").write_text("\n".join(lines) + "\n")


main()
