"""What the tokenizer files of a model's directory say: the tokenizer's fingerprint, and whether prompts begin
with a BOS. Loads no tokenizer.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def tokenizer_fingerprint(path: str | os.PathLike[str]) -> str | None:
    """sha256 (hex) of the directory's `tokenizer.json`, None where there is none."""
    file = Path(path) / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def prepended_bos(path: str | os.PathLike[str], bos_token_id: int | None) -> int | None:
    """The BOS that every prompt begins with; None where the directory does not show that every one does.

    A configuration often names a BOS that no prompt has. Only where the tokenizer puts that id in front of
    plain text, and the chat template, if there is one, writes it too, is a prompt without it a fault.

    Args:
        path: the model's directory.
        bos_token_id: the id by the model's configuration.

    Example:
        `tokenizer.json` with the template `<s> A`, `<s>` being id 1, and no chat template:
        bos_token_id 1 -> 1, bos_token_id 3 -> None
    """
    directory = Path(path)
    config = _read_object(directory / "tokenizer_config.json")
    first = _first_of_template(_read_object(directory / "tokenizer.json").get("post_processor"))
    # Older tokenizers take this flag over the template that was saved with them.
    if first is None or config.get("add_bos_token") is False:
        return None
    text, token_id = first
    if token_id != bos_token_id:
        return None
    chat = _chat_template(directory, config)
    return token_id if chat is None or "bos_token" in chat or text in chat else None


def _first_of_template(processor: object) -> tuple[str, int] | None:
    """Text and id of the special token that `TemplateProcessing` puts in front of a single text."""
    if not isinstance(processor, dict):
        return None
    for each in processor.get("processors") or ():
        found = _first_of_template(each)
        if found is not None:
            return found
    match processor:
        case {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": str(name)}}, *_],
            "special_tokens": dict(tokens),
        }:
            match tokens.get(name):
                case {"ids": [int(token_id), *_]}:
                    return name, token_id
    return None


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """The source of the chat template or templates; None where there is none."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    inline = config.get("chat_template")
    return None if inline is None else str(inline)


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object of a file; empty where there is none, or something else."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
