"""The task of `grpo.py`: prompts with one arithmetic operation each, and the reward of a completion.

The reward is self-consistency: the number after `####` is the last `= n` before it. Right arithmetic would be
the natural reward, but a model this small gets no better at it within minutes.
"""

import re
from collections.abc import Sequence

import numpy as np

NAMES = ["Anna", "Boris", "Chen", "Dana", "Emil", "Fatima", "Goro", "Hana", "Ivan", "Juno", "Kofi", "Lena"]
THINGS = ["apples", "pears", "coins", "books", "stones", "cards", "tickets", "stamps"]
HELD_OUT_THINGS = ["pens", "marbles"]
"""No training prompt is about these, so that none is a held-out one."""


def make_prompts(number: int, things: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Word problems with one operation each."""
    prompts = []
    for _ in range(number):
        (one, other), thing = rng.choice(NAMES, 2, replace=False), rng.choice(things)
        a, b, c = rng.integers([2, 2, 2], [61, 41, 10])
        problems = [
            f"{one} has {a} {thing} and buys {b} more. How many {thing} does {one} have?",
            f"{one} has {a + b} {thing} and gives {b} to {other}. How many {thing} are left?",
            f"There are {c} boxes with {b} {thing} each. How many {thing} in total?",
            f"{one} and {other} share {c * b} {thing} among {c} friends. How many {thing} for each?",
        ]
        prompts.append(f"Question: {rng.choice(problems)}\nAnswer:")
    return prompts


def reward_of(completion: str) -> float:
    """1 where the number after `####` is the last `= n` before it, else 0.

    Example:
        "3 * 5 = 15. #### 15" -> 1.0, "3 * 5 = 15. #### 35" -> 0.0
    """
    working, _, answer = completion.partition("####")
    results = re.findall(r"= (-?\d+)", working)
    return float(bool(results) and answer.strip() == results[-1])
