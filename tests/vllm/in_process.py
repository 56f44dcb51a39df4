"""Reads the output objects of vLLM in this process with rlbatch and, plainly, without it.

    VENV/bin/python in_process.py MODEL_DIR OUT.json      PYTHONPATH names the source roots of rlbatch

Runs under the engine's interpreter: rlbatch.engines needs numpy and msgspec only, which the engine has.
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

from rlbatch.engines import parse_response
from rlbatch.records import Provenance
from rlbatch.records import SamplingParams as Params

PROMPTS = [[1, 315, 30, 579, 298, 448, 368], [1, 899, 808]]


def plainly(output: Any, prompt: list[int]) -> list[Any]:
    """Prompt, ids, logprobs, ends of one completion."""
    ids = list(output.token_ids)
    values = [entry[token_id].logprob for token_id, entry in zip(ids, output.logprobs, strict=True)]
    return [prompt, ids, values, output.finish_reason, output.stop_reason, output.text]


def main() -> None:
    """One engine, two prompts with three completions each."""
    model, out = sys.argv[1:]
    llm = LLM(model, dtype="float32", max_model_len=512, max_num_seqs=8, enforce_eager=True, seed=0)
    sampling = SamplingParams(
        n=3,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        max_tokens=24,
        seed=7,
        logprobs=2,
        prompt_logprobs=1,
    )
    results = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], [sampling] * 2, use_tqdm=False)
    how = Provenance(engine="vllm", logprobs_mode="raw", sampling=Params(temperature=1.0))
    read, plain = [], []
    for result, prompt in zip(results, PROMPTS, strict=True):
        for turn in parse_response(result, provenance=how):
            lists = [turn.prompt_token_ids, turn.completion_token_ids, turn.inference_logprobs]
            read.append([*(each.tolist() for each in lists), turn.finish_reason, turn.stop_reason, turn.text])
        plain += [plainly(output, prompt) for output in result.outputs]
    Path(out).write_text(json.dumps({"read": read, "plain": plain}))


main()
