"""Flags that several commands share. The `Statement` about recorded JSON has one flag a field.

Imports neither torch nor transformers, so that help comes at once.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from rlbatch.engines import ENGINES
from rlbatch.records import LOGPROBS_MODES
from rlbatch.storage.statements import Statement

DTYPES = ("float32", "float64", "bfloat16", "float16")
FORMATS = ("terminal", "json")

HELP: dict[str, str] = {
    "engine": "What sampled; of rows from elsewhere, as transformers, vllm: its rules of truncation and "
    "of stop reasons are then held against them.",
    "engine_version": "Its version, kept for the record.",
    "logprobs_mode": "What the logprobs are of; vLLM's own default is raw.",
    "temperature": "0 is greedy.",
    "top_p": "1 is off.",
    "top_k": "0 and -1 are off.",
    "min_p": "0 is off.",
    "repetition_penalty": "1 is off.",
    "presence_penalty": "0 is off.",
    "frequency_penalty": "0 is off.",
    "logit_bias": "Whether logits were biased.",
    "allowed_token_ids": "Whether only listed ids could be drawn.",
    "bad_words": "Whether listed words could not be drawn.",
    "min_tokens": "Tokens before which nothing could stop; 0 is off.",
    "structured_output": "Whether a grammar was in force.",
}

_CHOICES: dict[str, tuple[str, ...]] = {"engine": tuple(sorted(ENGINES)), "logprobs_mode": LOGPROBS_MODES}


def one_of(choices: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of `typer.Option` for a text that must be one of `choices`."""

    def parse(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}.")
        return value

    return {"parser": parse, "metavar": f"[{'|'.join(choices)}]"}


def with_statement(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each field of `Statement` in place of its parameter `statement`."""
    types = get_type_hints(Statement)
    flags = [_flag(spec.name, types[spec.name]) for spec in fields(Statement)]
    own = [part for part in _signature(command).parameters.values() if part.name != "statement"]

    @functools.wraps(command)
    def filled(**values: Any) -> None:  # noqa: ANN401  typer fills them, by the signature below
        stated = {flag.name: values.pop(flag.name) for flag in flags}
        command(**values, statement=Statement(**stated))

    # What typer reads: the command's own parameters, then the flags.
    signature = inspect.Signature([*own, *flags])
    filled.__signature__ = signature  # type: ignore[attr-defined]
    filled.__annotations__ = {part.name: part.annotation for part in signature.parameters.values()}
    return filled


def _signature(command: Callable[..., None]) -> inspect.Signature:
    return inspect.signature(command, eval_str=True)


def _flag(name: str, kind: object) -> inspect.Parameter:
    choices = _CHOICES.get(name)
    option = typer.Option(help=HELP[name], show_default=False, **(one_of(choices) if choices else {}))
    annotation = Annotated[str | None if choices else kind, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
