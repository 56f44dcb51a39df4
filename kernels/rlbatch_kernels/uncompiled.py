"""`uncompiled`: for public ops, which torch.compile then calls as they are.

Traced, an op breaks the graph at each of its checks and warns of each. Imports nothing of the compiler, which
takes seconds, before somebody compiles.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(op: Callable[P, R]) -> Callable[P, R]:
    """The op, one break in the graph of whoever compiles a call of it."""

    @functools.wraps(op)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return op(*args, **kwargs)
        hidden: Callable[P, R] = torch.compiler.disable(op)  # type: ignore[no-untyped-call]
        return hidden(*args, **kwargs)

    return call
