"""What goes to a peer's process and comes back: JSON, with tensors and bytes spelled out; torch only."""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch


def to_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return value


def from_json(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"tensor", "values"}:
        return torch.tensor(value["values"], dtype=getattr(torch, value["tensor"]))
    if isinstance(value, dict) and value.keys() == {"bytes"}:
        return bytes.fromhex(value["bytes"])
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return value


def answer(compute: Callable[[Any], dict[str, Any]]) -> None:
    """Read a question from standard input, print the answer as the last line."""
    print(json.dumps(to_json(compute(from_json(json.load(sys.stdin))))))
