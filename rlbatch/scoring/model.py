"""A transformers model from a local directory, and its vocabulary size.

Never downloads, never runs code that lies beside the weights, never fills in weights that are missing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rlbatch.catalogue import finding
from rlbatch.errors import ScoringError, StorageError, Where
from rlbatch.scoring.wrappers import model_name, unwrapped

Getter: TypeAlias = Literal["get_input_embeddings", "get_output_embeddings"]

_FIX = "give a directory that save_pretrained wrote: config.json and safetensors weights"


def load_model(path: str | os.PathLike[str], *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """The causal language model of a directory, in eval mode.

    Args:
        path: directory with `config.json` and safetensors weights.
        device: where it goes.
        dtype: floating dtype of its weights, whatever they were stored in.

    Raises:
        StorageError: no such directory, no config, weights missing in whole or in part, truncated or of other
            shapes, or a model that transformers cannot make.
        ScoringError: torch cannot use the device on this machine, or the dtype is no floating one.
    """
    directory = Path(path)
    device = _present(device)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ScoringError.of(finding("dtype-unusable", expected="a floating torch.dtype", found=repr(dtype)))
    for name in ("", "config.json"):
        if not (directory / name).exists():
            raise _unusable(directory, f"a directory with {name or 'a model'}", f"no {directory / name}")
    try:
        model, missing = _from_pretrained(directory, dtype)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise _unusable(directory, "a causal language model", f"{type(error).__name__}: {error}") from error
    if missing:
        # transformers has drawn them at random.
        raise _unusable(directory, "every weight of the model", f"no {missing[0]} ({len(missing)} missing)")
    loaded: nn.Module = model.to(device).eval()
    return loaded


def _from_pretrained(directory: Path, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """The model, and the names of weights that its files do not have."""
    # Imported here: it takes seconds, which only those who load a model should pay.
    from transformers import AutoModelForCausalLM

    with _no_progress_bar():
        answer: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    model, info = answer
    return model, sorted(info["missing_keys"])


def model_vocab_size(model: nn.Module) -> int:
    """Ids that the model can both read and predict: rows of the smaller of its two embeddings.

    Raises:
        ScoringError: the input embedding is not a table of vectors.
    """
    num_rows = num_input_rows(model)
    head = embedding_of(model, "get_output_embeddings")
    num_outputs = None if head is None else _num_rows(head, "out_features")
    return num_rows if num_outputs is None else min(num_rows, num_outputs)


def num_input_rows(model: nn.Module) -> int:
    """Ids that the model can read.

    Raises:
        ScoringError: the input embedding is not a table of vectors.
    """
    embedding = embedding_of(model, "get_input_embeddings")
    num_rows = None if embedding is None else _num_rows(embedding, "num_embeddings")
    if num_rows is None:
        raise ScoringError.of(
            finding(
                "head-unusable",
                expected=f"an input embedding with a weight [V, D], in {model_name(model)}",
                found=type(embedding).__name__,
            )
        )
    return num_rows


def input_weight(model: nn.Module) -> Tensor:
    """Of the input embedding, for dtype and device: what is sharded has any shape outside its forward.

    Raises:
        ScoringError: the input embedding is not a table of vectors.
    """
    num_input_rows(model)
    embedding: Any = embedding_of(model, "get_input_embeddings")
    weight: Tensor = embedding.weight
    return weight


def embedding_of(model: nn.Module, getter: Getter) -> nn.Module | None:
    """What the getter of the model within its wrappers gives; None where it has no such getter."""
    find = getattr(unwrapped(model), getter, None)
    found: nn.Module | None = None if find is None else find()
    return found


def _num_rows(table: nn.Module, declared: str) -> int | None:
    """Rows of the table's weight; of a sharded one, which may be flat, those that the module declares."""
    weight = getattr(table, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    num_rows = weight.shape[0] if weight.dim() == 2 else getattr(unwrapped(table), declared, None)
    return num_rows if isinstance(num_rows, int) else None


def _present(device: torch.device | str) -> torch.device:
    """The device, where torch can use it on this machine."""
    try:
        known = torch.device(device)
        if known.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            found = None if (known.index or 0) < count else f"{count} CUDA devices"
        else:
            torch.empty(0, device=known)
            found = None
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        # The first line says it; a backend may add a page of advice.
        found = str(error).partition("\n")[0]
    if found is not None:
        raise ScoringError.of(finding("device-missing", expected=f"the device {device!s}", found=found))
    return known


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _unusable(directory: Path, expected: str, found: str) -> StorageError:
    return StorageError.of(
        finding(
            "file-unusable",
            where=Where(path=str(directory)),
            expected=expected,
            found=found,
            likely="the path is wrong, or the model was saved in part",
            fix=_FIX,
        )
    )
