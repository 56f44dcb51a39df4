"""`Entry`: what is known of one code, and the fixes that several share."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rlbatch.errors import Severity

Level: TypeAlias = Literal["reply", "storage", "sound", "scoring", "aligned", "drift", "ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known of one code."""

    code: str
    level: Level
    """Where it can be found: in a reply, a file, samples alone, a model, against it, in the aggregate, or in
    a group of ranks."""
    severity: Severity
    """Unless the finding says otherwise."""
    symptom: str
    check: str
    """How it is found."""
    likely: str
    fix: str


EXACT_IDS = (
    "ask the engine for exact ids (vLLM: return_token_ids) and parse with rlbatch.engines.parse_response"
)
"""The fix for everything that comes of encoding text again."""
