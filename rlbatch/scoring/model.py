"""A transformers model from a local directory, its vocabulary size, and its tokenizer's fingerprint.

Never downloads, never runs code that lies beside the weights, never fills in weights that are missing.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlbatch.catalogue import finding
from rlbatch.errors import ScoringError, StorageError, Where

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FIX = "give a directory that save_pretrained wrote: config.json and safetensors weights"


def load_model(
    path: str | os.PathLike[str], *, device: torch.device | str, dtype: torch.dtype
) -> "PreTrainedModel":
    """The causal language model of a directory, in eval mode.

    Args:
        path: directory with `config.json` and safetensors weights.
        device: where it goes.
        dtype: floating dtype of its weights, whatever they were stored in.

    Raises:
        StorageError: no such directory, no config, weights missing in whole or in part, truncated or of other
            shapes, or a model that transformers cannot make.
        ScoringError: the device is not on this machine.
    """
    directory = Path(path)
    device = _present(device)
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
    loaded: PreTrainedModel = model.to(device).eval()
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


def model_vocab_size(model: "PreTrainedModel") -> int:
    """Ids that the model can both read and predict: rows of the smaller of its two embeddings."""
    num_rows = input_weight(model).shape[0]
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return num_rows if head is None else min(num_rows, int(head.weight.shape[0]))


def input_weight(model: "PreTrainedModel") -> Tensor:
    """[V, D] weight of the input embedding.

    Raises:
        ScoringError: the embedding is not a table of vectors.
    """
    embedding = model.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        expected, found = "an input embedding with a weight [V, D]", type(embedding).__name__
        raise ScoringError.of(finding("head-unusable", expected=expected, found=found))
    return weight


def tokenizer_fingerprint(path: str | os.PathLike[str]) -> str | None:
    """sha256 (hex) of the directory's `tokenizer.json`, None where there is none."""
    file = Path(path) / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _present(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ScoringError.of(
            finding("device-missing", expected=f"the device {device}", found=f"{count} CUDA devices")
        )
    return device


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
