"""A reply's `usage`, and every count of a reply held against what it counts.

For all engines: counts are named where they stand, tokens are counted and never shown.
"""

from collections.abc import Sequence

import msgspec

from rlbatch.engines.output import EngineOutput
from rlbatch.engines.refusals import refusal


class PromptDetails(msgspec.Struct, gc=False):
    """What `usage` says of the prompt's tokens."""

    cached_tokens: int | None = None


class Counts(msgspec.Struct, gc=False):
    """The reply's `usage`: the completion's tokens summed over choices, each prompt's counted once."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that came from a cache; None where unsaid."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


def check_usage(
    usage: Counts | None,
    outputs: Sequence[EngineOutput],
    *,
    num_prompts: int | None,
    num_unasked: int = 0,
) -> None:
    """Refuse counts that are not those of the reply's lists.

    Args:
        usage: None where the reply has none.
        outputs: the choices, ordered by index.
        num_prompts: None where only the sum over choices is known.
        num_unasked: ids that the engine counts and no choice keeps.

    Raises:
        ReplyError: usage-mismatch or statement-contradicted.
    """
    if usage is None or not all(output.aligned for output in outputs):
        # Lists of unequal lengths are refused by `to_turn`, which has more to say.
        return
    num_ids = sum(len(output.completion_token_ids or ()) for output in outputs) + num_unasked
    check_count("the reply", "usage.completion_tokens", usage.completion_tokens, num_ids)
    num_prompts = 1 if len(outputs) == 1 else num_prompts
    if num_prompts and all(output.prompt_token_ids is not None for output in outputs):
        firsts = outputs[:: len(outputs) // num_prompts]
        num_prompt_ids = sum(len(output.prompt_token_ids or ()) for output in firsts)
        check_count("the reply", "usage.prompt_tokens", usage.prompt_tokens, num_prompt_ids)
        check_count("the reply", "usage.total_tokens", usage.total_tokens, num_prompt_ids + num_ids)
        check_cached("the reply", usage.cached_tokens, num_prompt_ids)


def check_count(label: str, name: str, said: int | None, counted: int) -> None:
    """Refuse a count that is not the length of what it counts.

    Raises:
        ReplyError: usage-mismatch.
    """
    if said is not None and said != counted:
        raise refusal(
            "usage-mismatch",
            f"{name} equal to the number of ids",
            f"{label}: {name} is {said}, the lists have {counted} ids",
        )


def check_cached(label: str, cached: int | None, num_prompt: int) -> None:
    """Refuse more tokens of the prompt from a cache than the prompt has; which they were is not said.

    Raises:
        ReplyError: statement-contradicted.
    """
    if cached is not None and not 0 <= cached <= num_prompt:
        raise refusal(
            "statement-contradicted",
            f"cached_tokens among the prompt's {num_prompt}",
            f"{label}: cached_tokens is {cached}",
        )
