"""Samples many rollouts with vLLM in this process and writes them as shards: rows that limits are set on.

    VENV/bin/python sample_rollouts.py MODEL_DIR OUT_DIR --dtype bfloat16 --logprobs-mode processed \
        --num-groups 250 --seed 11        PYTHONPATH names the source roots of rlbatch

Rows differ in prompt (chat, arithmetic, plain text), temperature (0.5 to 2), length (4 to 400 tokens, even in
their logarithm), end (own or forced), truncation (some), and number of turns (one or two). Runs under the
engine's interpreter: what it needs of rlbatch needs numpy and msgspec only, which the engine has.
"""

import argparse
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
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

import vllm
from vllm import LLM

from rlbatch.assemble import to_samples
from rlbatch.engines import parse_response
from rlbatch.records import Provenance, Sample, SamplingParams, Trajectory, Turn
from rlbatch.storage import open_writer

GROUP_SIZE = 4
"""Completions of one prompt."""
GROUPS_A_CALL = 128
"""Prompts handed to the engine at once; progress is told after each call."""
CONTEXT = 512
"""What the example's model was trained for; the longest prompt and completion together stay below."""
SHORTEST, LONGEST = 4, 400
SHARE_FORCED = 0.5
"""Groups whose completions do not end before their length."""
SHARE_NEUTRAL = 0.3
"""Groups at temperature 1: of a raw server only these can be trained on."""
SHARE_TRUNCATED = 0.1
SHARE_SECOND_TURN = 0.15
SECOND_TURN_FROM = 160
"""Most tokens of the first turn's prompt and completion for which there is a second one."""

NAMES = ("Anna", "Boris", "Chen", "Dana", "Goro", "Lena", "Nour", "Olga")
THINGS = ("apples", "pears", "coins", "books", "stones", "cards", "pens")
TEXTS = ("Question:", "The answer is", "There are", "Answer: Each", "Let me", "How many", "Привет", "naïve")


@dataclass(frozen=True)
class Draw:
    """How the completions of one prompt are sampled."""

    prompt: list[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    forced: bool
    seed: int

    def fields(self, *, n: int, prompt_length: int) -> dict[str, Any]:
        """Every field that shapes the distribution, by name: a generation_config must not set any."""
        return {
            "n": n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_tokens": 0,
            "max_tokens": min(self.max_tokens, CONTEXT - prompt_length),
            "ignore_eos": self.forced,
            "seed": self.seed,
            "logprobs": 0,
        }


def main() -> None:
    """One engine, one directory of shards."""
    arguments = read_arguments()
    llm = LLM(
        str(arguments.model),
        dtype=arguments.dtype,
        logprobs_mode=f"{arguments.logprobs_mode}_logprobs",
        max_model_len=CONTEXT,
        max_num_seqs=256,
        # Room for all prompts at once: a seeded generator on CPU fails where a prompt is read in two pieces.
        max_num_batched_tokens=65536,
        enforce_eager=True,
        seed=0,
    )
    rng = random.Random(arguments.seed)
    draws = [draw(llm.get_tokenizer(), rng) for _ in range(arguments.num_groups)]
    with open_writer(arguments.out) as writer:
        for start in range(0, len(draws), GROUPS_A_CALL):
            for sample in rows(llm, draws[start : start + GROUPS_A_CALL], rng, arguments, start):
                writer.append(sample)
            sys.stderr.write(f"{min(start + GROUPS_A_CALL, len(draws))} of {len(draws)} groups\n")


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Sample many rollouts with vLLM in this process.")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--logprobs-mode", choices=("processed", "raw"), required=True)
    parser.add_argument("--num-groups", type=int, required=True, help=f"prompts, {GROUP_SIZE} rows each")
    parser.add_argument("--seed", type=int, required=True)
    return parser.parse_args()


def rows(
    llm: LLM, draws: list[Draw], rng: random.Random, arguments: argparse.Namespace, first: int
) -> Iterator[Sample]:
    """The samples of some groups; some rollouts go on for a second turn."""
    hows = [provenance_of(each, arguments) for each in draws]
    firsts = generate(llm, [(each, each.prompt, GROUP_SIZE) for each in draws], hows)
    going_on = [
        (group, at)
        for group, turns in enumerate(firsts)
        for at, turn in enumerate(turns)
        if num_tokens(turn) <= SECOND_TURN_FROM and rng.random() < SHARE_SECOND_TURN
    ]
    follow = follow_up(llm.get_tokenizer(), rng)
    seconds = generate(
        llm,
        [(draws[group], history(firsts[group][at]) + follow, 1) for group, at in going_on],
        [hows[group] for group, _ in going_on],
    )
    second_of = {place: turns[0] for place, turns in zip(going_on, seconds, strict=True)}
    for group, turns in enumerate(firsts):
        name = f"{arguments.dtype}-{arguments.logprobs_mode}-{arguments.seed}/{first + group}"
        for at, turn in enumerate(turns):
            later = second_of.get((group, at))
            yield from to_samples(
                Trajectory(
                    trajectory_id=f"{name}#{at}",
                    group_id=name,
                    turns=(turn,) if later is None else (turn, later),
                )
            )


def generate(llm: LLM, calls: list[tuple[Draw, list[int], int]], hows: list[Provenance]) -> list[list[Turn]]:
    """The turns of each call."""
    if not calls:
        return []
    fields = [each.fields(n=n, prompt_length=len(prompt)) for each, prompt, n in calls]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for _, prompt, _ in calls],
        [vllm.SamplingParams(**each) for each in fields],
        use_tqdm=False,
    )
    return [parse_response(output, provenance=how) for output, how in zip(outputs, hows, strict=True)]


def draw(tokenizer: Any, rng: random.Random) -> Draw:
    """One prompt and how it is sampled."""
    truncated = rng.random() < SHARE_TRUNCATED
    by_top_p = rng.random() < 0.5
    return Draw(
        prompt=prompt_ids(tokenizer, rng),
        temperature=1.0 if rng.random() < SHARE_NEUTRAL else round(rng.uniform(0.5, 2.0), 2),
        top_p=round(rng.uniform(0.5, 0.95), 2) if truncated and by_top_p else 1.0,
        top_k=rng.randint(5, 50) if truncated and not by_top_p else 0,
        max_tokens=round(SHORTEST * (LONGEST / SHORTEST) ** rng.random()),
        forced=rng.random() < SHARE_FORCED,
        seed=rng.randrange(2**31),
    )


def prompt_ids(tokenizer: Any, rng: random.Random) -> list[int]:
    """A question as a chat, as plain arithmetic, or the beginning of any text."""
    kind = rng.choice(("chat", "arithmetic", "text"))
    question = (
        f"{rng.choice(NAMES)} has {rng.randint(2, 60)} {rng.choice(THINGS)} and gives {rng.randint(1, 9)} to "
        f"{rng.choice(NAMES)}. How many are left?"
    )
    if kind == "chat":
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return encode(tokenizer, text)
    if kind == "arithmetic":
        return [tokenizer.bos_token_id, *encode(tokenizer, f"Question: {question}\nAnswer:")]
    return [tokenizer.bos_token_id, *encode(tokenizer, rng.choice(TEXTS))]


def follow_up(tokenizer: Any, rng: random.Random) -> list[int]:
    """What a user says after the first turn, and the header of the second."""
    asked = f"And {rng.randint(2, 9)} times as many?"
    text = f"\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    return encode(tokenizer, text)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, without an automatic BOS."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def provenance_of(each: Draw, arguments: argparse.Namespace) -> Provenance:
    """How the logprobs of a draw come to be."""
    config = json.loads((arguments.model / "config.json").read_text())
    generation = json.loads((arguments.model / "generation_config.json").read_text())
    return Provenance(
        engine="vllm",
        engine_version=vllm.__version__,
        model=arguments.model.name,
        dtype=arguments.dtype,
        logprobs_mode=arguments.logprobs_mode,
        sampling=SamplingParams(temperature=each.temperature, top_p=each.top_p, top_k=each.top_k),
        vocab_size=config["vocab_size"],
        eos_token_ids=tuple(generation["eos_token_id"]),
        tokenizer_fingerprint=hashlib.sha256((arguments.model / "tokenizer.json").read_bytes()).hexdigest(),
    )


def history(turn: Turn) -> list[int]:
    """All ids after a turn."""
    return [*turn.prompt_token_ids.tolist(), *turn.completion_token_ids.tolist()]


def num_tokens(turn: Turn) -> int:
    """Prompt and completion."""
    return len(turn.prompt_token_ids) + len(turn.completion_token_ids)


if __name__ == "__main__":
    main()
