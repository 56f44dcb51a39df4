"""Damages replies by the thousand and judges what the parsers make of each mutant.

    python tests/fuzz/fuzz_run.py --mutants 200000

A mutant is parsed to exactly what the independent reader reads in it, or refused with an rlbatch error. What
the reader calls contradictory or incomplete must be refused. Any other exception is a failure.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from fuzz_mutations import KINDS, mutant
from fuzz_reader import Said, UnsaidError, says
from fuzz_seeds import Seed, all_seeds, sse_of

from rlbatch.engines import ResponseAssembler, parse_response
from rlbatch.errors import RlbatchError
from rlbatch.records import Turn

UNREAD = ("created", "model", "system_fingerprint", "service_tier", "kv_transfer_params", "metrics")
"""Fields that say nothing of tokens: damage there must not make a reply unreadable."""


class FooledError(AssertionError):
    """A mutant was parsed to something else than it says, or in spite of its contradictions."""


def parse(seed: Seed, tree: Any, *, as_bytes: bool) -> list[Turn]:
    """The parsers' reading, from the object or from what a server would send."""
    if seed.streamed:
        return parse_text(seed, sse_of(tree))
    if as_bytes:
        return parse_text(seed, json.dumps(tree))
    return parse_response(tree, engine=seed.engine, request=seed.request, provenance=seed.provenance)


def parse_text(seed: Seed, text: str) -> list[Turn]:
    """The parsers' reading of a body; a stream's comes in two pieces."""
    if not seed.streamed:
        return parse_response(
            text.encode(), engine=seed.engine, request=seed.request, provenance=seed.provenance
        )
    assembler = ResponseAssembler(engine=seed.engine, request=seed.request, provenance=seed.provenance)
    middle = len(text) // 2
    assembler.feed(text[:middle].encode())
    assembler.feed(text[middle:].encode())
    return assembler.finish()


def judge(seed: Seed, tree: Any, *, as_bytes: bool = False) -> str:
    """`accepted` or `refused`; raises `FooledError` where that is wrong, and any foreign error as it is."""
    try:
        expected: list[Said] | str = says(seed.engine, tree, seed.request)
    except UnsaidError as error:
        expected = str(error)
    try:
        turns = parse(seed, tree, as_bytes=as_bytes)
    except RlbatchError:
        return "refused"
    if isinstance(expected, str):
        raise FooledError(f"accepted, although: {expected}")
    return judged(turns, expected)


def judged(turns: list[Turn], expected: list[Said]) -> str:
    """`accepted`, where the turns are what the reply says."""
    if len(turns) != len(expected):
        raise FooledError(f"{len(turns)} turns, {len(expected)} choices")
    for turn, said in zip(turns, expected, strict=True):
        same = (
            turn.prompt_token_ids.tolist() == said.prompt
            and turn.completion_token_ids.tolist() == said.ids
            and turn.finish_reason == said.finish
            and np.array_equal(turn.inference_logprobs, np.array(said.logprobs, np.float32))
            and (turn.routed_experts is None) == (said.routing is None)
            and (said.routing is None or np.array_equal(turn.routed_experts, said.routing))
        )
        if not same:
            raise FooledError("parsed to something else than it says")
    return "accepted"


def judge_cut(seed: Seed, rng: random.Random) -> str:
    """The same for the text of a whole reply that was cut off anywhere."""
    text = sse_of(seed.tree) if seed.streamed else json.dumps(seed.tree)
    cut = text[: rng.randrange(len(text))]
    try:
        turns = parse_text(seed, cut)
    except RlbatchError:
        return "refused"
    # Only an end that nobody needs can be missing.
    if not seed.streamed or "[DONE]" not in cut:
        raise FooledError("accepted, although cut off")
    return judged(turns, says(seed.engine, seed.tree, seed.request))


def readable(seeds: list[Seed]) -> list[Seed]:
    """The seeds that parse undamaged."""
    return [seed for seed in seeds if judge(seed, seed.tree) == "accepted"]


def fuzz(
    seeds: list[Seed], num_mutants: int, random_seed: int
) -> tuple[Counter[tuple[str, str, str]], list[str]]:
    """Outcomes counted by (engine and form, kind, outcome), and a line for each mutant judged wrongly."""
    rng = random.Random(random_seed)
    counts: Counter[tuple[str, str, str]] = Counter()
    failures = []
    for index in range(num_mutants):
        seed = seeds[index % len(seeds)]
        kind = rng.choice([*KINDS, "cut"])
        tree, path = (None, ("text",)) if kind == "cut" else mutant(seed.tree, kind, rng)
        as_bytes = seed.streamed or rng.random() < 0.5
        try:
            outcome = judge_cut(seed, rng) if kind == "cut" else judge(seed, tree, as_bytes=as_bytes)
            if outcome == "refused" and harmless(tree, kind, path):
                raise FooledError("refused for a field that says nothing of tokens")
        except Exception as error:
            outcome = "FAILED"
            failures.append(f"{seed.name} {kind} {'.'.join(map(str, path))}: {type(error).__name__}: {error}")
        counts[seed.engine + (" stream" if seed.streamed else ""), kind, outcome] += 1
    return counts, failures


def harmless(tree: Any, kind: str, path: tuple[Any, ...]) -> bool:
    """Damage to one of the fields that say nothing of tokens, which is JSON still."""
    text = json.dumps(tree)
    whole = "NaN" not in text and "0" * 400 not in text
    return whole and kind not in ("swap", "duplicate") and any(part in UNREAD for part in path)


def table(counts: Counter[tuple[str, str, str]]) -> str:
    """Accepted and refused by engine and kind."""
    lines = [f"{'form':20} {'kind':10} {'accepted':>9} {'refused':>9} {'failed':>7}"]
    for form, kind in sorted({key[:2] for key in counts}):
        numbers = [counts[form, kind, outcome] for outcome in ("accepted", "refused", "FAILED")]
        lines.append(f"{form:20} {kind:10} {numbers[0]:9} {numbers[1]:9} {numbers[2]:7}")
    sums = [
        sum(n for key, n in counts.items() if key[2] == outcome)
        for outcome in ("accepted", "refused", "FAILED")
    ]
    lines.append(f"{'all':20} {'':10} {sums[0]:9} {sums[1]:9} {sums[2]:7}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    seeds = readable(all_seeds())
    counts, failures = fuzz(seeds, options.mutants, options.seed)
    seconds = time.perf_counter() - start
    lines = [table(counts), f"{len(seeds)} seeds, {options.mutants} mutants, {seconds:.0f} s", *failures[:40]]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
