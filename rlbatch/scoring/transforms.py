"""What the models of transformers do to logits after the head, and how it is switched off.

Under `logprob_head` the head gives logprobs, which must reach the caller as they are: what the model would do
to logits is switched off for that time and handed to the op. The table is a claim, which
`rlbatch.scoring.proof` checks on every model before it is used. It was read from transformers 5.24; a model
that it lacks is refused there when its logits turn out to be changed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from rlbatch.catalogue import finding
from rlbatch.errors import ScoringError
from rlbatch.scoring.wrappers import model_name, unwrapped

Role: TypeAlias = Literal["multiplier", "divisor", "cap"]

# cap * tanh(x / cap) with a power of two so far above any logprob that x comes back exactly. None is not an
# option: some configs type the cap as a float, and some models divide by it unasked.
_NO_CAP = 2.0**40
_OFF: dict[Role, float] = {"multiplier": 1.0, "divisor": 1.0, "cap": _NO_CAP}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One number by which a model changes its logits."""

    path: str
    """Attributes from the model on; `text_config` is `model.config.get_text_config()`."""
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """logits = soft_cap * tanh(logit_scale * head_output / soft_cap)."""

    logit_scale: float = 1.0
    soft_cap: float | None = None
    """None: no tanh."""

    def __call__(self, head_output: Tensor) -> Tensor:
        """Logits in float64, of any shape."""
        logits = head_output.double() * self.logit_scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


_CAP = (Knob(path="text_config.final_logit_softcapping", role="cap"),)
_COHERE = (Knob(path="logit_scale", role="multiplier"),)
_GRANITE = (Knob(path="text_config.logits_scaling", role="divisor"),)
_HYPERCLOVAX = (Knob(path="text_config.logits_scaling", role="multiplier"),)
_INKLING2 = (Knob(path="logit_softcap.softcap", role="cap"),)
_MUSE = (Knob(path="text_config.output_multiplier", role="multiplier"), *_CAP)

# By class name: the classes are imported by whoever has a model of theirs.
KNOBS: dict[str, tuple[Knob, ...]] = {
    "BeamForCausalLM": _CAP,
    "Cohere2ForCausalLM": _COHERE,
    "Cohere2MoeForCausalLM": _COHERE,
    "CohereCompassForCausalLM": _COHERE,
    "CohereCompassForConditionalGeneration": _COHERE,
    "CohereForCausalLM": _COHERE,
    "FalconH1ForCausalLM": (Knob(path="model.lm_head_multiplier", role="multiplier"),),
    "Gemma2ForCausalLM": _CAP,
    "Gemma3ForCausalLM": _CAP,
    "Gemma3nForCausalLM": _CAP,
    "Gemma3nForConditionalGeneration": _CAP,
    "Gemma4ForCausalLM": _CAP,
    "Gemma4ForConditionalGeneration": _CAP,
    "Gemma4UnifiedForCausalLM": _CAP,
    "Gemma4UnifiedForConditionalGeneration": _CAP,
    "Granite4VisionForConditionalGeneration": _GRANITE,
    "GraniteDoclingForConditionalGeneration": _GRANITE,
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeForCausalLM": _GRANITE,
    "GraniteMoeHybridForCausalLM": _GRANITE,
    "GraniteMoeSWAForCausalLM": _GRANITE,
    "GraniteMoeSharedForCausalLM": _GRANITE,
    "GraniteSWAForCausalLM": _GRANITE,
    "HyperCLOVAXForCausalLM": _HYPERCLOVAX,
    "HyperCLOVAXVisionV2ForConditionalGeneration": _HYPERCLOVAX,
    "Inkling2ForCausalLM": _INKLING2,
    "Inkling2ForConditionalGeneration": _INKLING2,
    "Inkling2LoopForCausalLM": _INKLING2,
    "Inkling2LoopForConditionalGeneration": _INKLING2,
    "MistralLarge4ForConditionalGeneration": (Knob(path="final_logit_softcapping", role="cap"),),
    "MuseGlimmerForConditionalGeneration": _MUSE,
    "MuseSparkForConditionalGeneration": _MUSE,
    "NanoChatForCausalLM": _CAP,
    "PaliGemmaForConditionalGeneration": _CAP,
    "RecurrentGemmaForCausalLM": (Knob(path="text_config.logits_soft_cap", role="cap"),),
    "VaultGemmaForCausalLM": _CAP,
    "xLSTMForCausalLM": (Knob(path="text_config.output_logit_soft_cap", role="cap"),),
}
"""Models known to change logits after the head."""


def logit_transform(model: nn.Module) -> LogitTransform:
    """What the model does to its logits, by the table and its present numbers.

    Raises:
        ScoringError: a number of the table is something else on this model.
    """
    scale, cap = 1.0, None
    for knob, _, _, value in _settings(model):
        if knob.role == "multiplier":
            scale *= value
        elif knob.role == "divisor":
            scale /= value
        else:
            cap = value
    return LogitTransform(logit_scale=scale, soft_cap=cap)


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Within, the model leaves what its head gives as it is."""
    settings = _settings(model)
    try:
        for knob, owner, name, _ in settings:
            setattr(owner, name, _OFF[knob.role])
        yield
    finally:
        for _, owner, name, value in settings:
            setattr(owner, name, value)


def _settings(model: nn.Module) -> list[tuple[Knob, object, str, float]]:
    """(knob, owner, attribute, value) of every number that is set; None means that the model skips it."""
    inner: Any = unwrapped(model)
    names = [cls.__name__ for cls in type(inner).__mro__]
    knobs = next((KNOBS[name] for name in names if name in KNOBS), ())
    found = []
    for knob in knobs:
        *parents, name = knob.path.split(".")
        owner: object = inner
        for parent in parents:
            owner = (
                inner.config.get_text_config() if parent == "text_config" else getattr(owner, parent, None)
            )
        value = getattr(owner, name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ScoringError.of(
                finding(
                    "head-unknown",
                    expected=f"a number at {knob.path} of {model_name(model)}",
                    found=type(value).__name__,
                )
            )
        found.append((knob, owner, name, value))
    return found
