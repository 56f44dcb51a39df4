"""`Dialect`: what a trainer's form carries and demands, and the refusal of what it would lose.

All forms are made from samples, whose entry t is about token t, so that each states its own shift once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.dialects.reading import as_float32
from rlbatch.errors import RecordError
from rlbatch.records import TOKEN_FIELDS, Sample
from rlbatch.records.structure import check_choice

LOGPROB_FIELDS = tuple(spec.name for spec in TOKEN_FIELDS if spec.name.endswith("_logprobs"))

_ALWAYS_CARRIED = ("token_ids", "loss_mask", "turn")
"""`turn` is no trainer's; from_dict takes it from the batch that was sent."""

_DROPPABLE = (
    *(spec.name for spec in TOKEN_FIELDS if spec.name not in _ALWAYS_CARRIED),
    "routed_experts",
    "media",
)

_UNSAID = {spec.name: spec.padding for spec in TOKEN_FIELDS}

FILLER = 0.0
"""What stands at untrained tokens, but for a temperature: all mask it."""

_NEUTRAL = {"temperature": 1.0, "policy_version": -1.0}
"""What a field says where it says nothing; a logprob says nothing where it is NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One trainer's form of a batch."""

    name: str
    carries: tuple[str, ...]
    """Fields at trained tokens, besides ids and mask, which every form has."""
    keys: tuple[str, ...]
    """Of the form, those that it need not have too."""
    one_value_a_row: tuple[str, ...] = ()
    """Fields for which the form has one number a row."""
    count_key: str | None = None
    """Where the form says how many tokens the optimiser step trains, if it does."""
    encode: Callable[[Sequence[Sample], frozenset[str]], dict[str, Any]]
    """Samples and the fields to leave out -> the form; values at untrained tokens are its own filler."""
    decode: Callable[[Mapping[str, Any], Sequence[Sample]], list[dict[str, Any]]]
    """The form, and the samples it was made of -> for each sample what changes: [T] arrays by field."""

    def require_carried(self, samples: Sequence[Sample], drop: frozenset[str]) -> None:
        """Refuse what the form would lose or turn into nonsense.

        Raises:
            RecordError: a field that is neither carried nor dropped says something at trained tokens; one
                that is carried is there for some samples, and not for one that has trained tokens; several
                values in a row where the form has room for one; a trained value that is not finite; a name in
                `drop` that is no field's.
        """
        for name in sorted(drop):
            check_choice(f"as_dict({self.name!r}): drop", name, _DROPPABLE)
        for name in self.carries:
            if name not in drop:
                self._require_everywhere(samples, name)
        for sample in samples:
            for name in _said(sample):
                if name not in self.carries and name not in drop:
                    raise RecordError(
                        f"as_dict({self.name!r}): {name} of sample {sample.sample_id!r} would be lost; "
                        f"{self.name} carries {', '.join(self.carries)}. "
                        f"If the trainer gets it another way, say drop=({name!r},)"
                    )
            self._require_values(sample, drop)

    def _require_everywhere(self, samples: Sequence[Sample], name: str) -> None:
        # The form has no word for "absent": its filler at a trained token would be taken for a value.
        having = [sample for sample in samples if getattr(sample, name) is not None]
        lacking = [sample for sample in samples if getattr(sample, name) is None and sample.loss_mask.any()]
        if having and lacking:
            raise RecordError(
                f"as_dict({self.name!r}): expected {name} of every sample with trained tokens, found it in "
                f"sample {having[0].sample_id!r} and not in {lacking[0].sample_id!r} ({len(lacking)} such). "
                f"If the trainer does without, say drop=({name!r},)"
            )

    def _require_values(self, sample: Sample, drop: frozenset[str]) -> None:
        trained = sample.loss_mask
        for name in (name for name in self.carries if name not in drop and name != "routed_experts"):
            values = getattr(sample, name)
            if values is None or not trained.any():
                continue
            bad = np.flatnonzero(trained & ~np.isfinite(values))
            if len(bad):
                raise RecordError(
                    f"as_dict({self.name!r}): expected finite {name} at trained tokens, found "
                    f"{float(values[bad[0]])} at token {int(bad[0])} of sample {sample.sample_id!r}"
                )
            distinct = np.unique(values[trained])
            if name in self.one_value_a_row and len(distinct) > 1:
                raise RecordError(
                    f"as_dict({self.name!r}): expected one value of {name} a row, found {len(distinct)} in "
                    f"sample {sample.sample_id!r} ({distinct[0]:g} to {distinct[-1]:g}). "
                    f"If the trainer gets them another way, say drop=({name!r},)"
                )


def _said(sample: Sample) -> list[str]:
    """Fields that say something at some trained token."""
    trained = sample.loss_mask
    said = [
        spec.name
        for spec in TOKEN_FIELDS
        if spec.name not in _ALWAYS_CARRIED
        and (values := getattr(sample, spec.name)) is not None
        and _says(spec.name, values[trained])
    ]
    if trained.any():
        said += ["routed_experts"] if sample.routed_experts is not None else []
        said += ["media"] if sample.media else []
    return said


def _says(name: str, values: NDArray[Any]) -> bool:
    if name in LOGPROB_FIELDS:
        return not np.isnan(values).all()
    return bool((values != _NEUTRAL.get(name, 0.0)).any())


def at_trained(sample: Sample, values: NDArray[Any], filler: float) -> NDArray[Any]:
    """[T] values where trained, the filler elsewhere."""
    return np.where(sample.loss_mask, values, np.array(filler, values.dtype))


def split(sample: Sample) -> int:
    """Tokens of the prompt: all before the first that was sampled or is trained."""
    completion = (sample.turn >= 0) | sample.loss_mask
    return int(completion.argmax()) if completion.any() else len(sample)


def merged(
    sample: Sample, name: str, incoming: NDArray[Any], trained: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """[T] the incoming values at trained tokens; elsewhere what was there before.

    A token that is trained from now on and still has the filler was given no value: its own one stays.

    Args:
        sample: as it was sent.
        name: of the field.
        incoming: [T] what came back; fillers at tokens that were not trained when it was sent.
        trained: [T] the mask that came back.

    Raises:
        RecordError: such a token has no value of its own; a value that float32 does not hold.
    """
    own = getattr(sample, name)
    before = np.full(len(sample), _UNSAID[name], np.float32) if own is None else own
    values = as_float32(name, np.where(trained, incoming, 0))
    is_filler = trained & ~sample.loss_mask & (values == _NEUTRAL.get(name, FILLER))
    lacking = np.flatnonzero(is_filler & np.isnan(before))
    if len(lacking):
        raise RecordError(
            f"from_dict: expected {name} of every token that is trained from now on, found a filler in the "
            f"dict and nothing in the batch for token {int(lacking[0])} of sample {sample.sample_id!r} "
            f"({len(lacking)} such)"
        )
    return np.where(trained & ~is_filler, values, before)
