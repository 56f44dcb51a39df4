"""Corruptions, one a code: what goes wrong in other people's pipelines, planted on purpose into good samples.

Shared by the demonstration, the drill, the example and the tests. Knows records and nothing of the checks;
magnitudes and places are drawn from the generator that is passed.
"""

from collections.abc import Mapping
from types import MappingProxyType

from rlbatch.faults.modelled import MODELLED
from rlbatch.faults.planting import Fault, ModelFault, Score, Scored
from rlbatch.faults.shifts import SHIFTS, shift
from rlbatch.faults.sound import SOUND
from rlbatch.faults.subtle import SUBTLE
from rlbatch.faults.values import VALUES

__all__ = ["FAULTS", "MODEL_FAULTS", "Fault", "ModelFault", "Score", "Scored", "shift"]

FAULTS: Mapping[str, Fault] = MappingProxyType(
    {fault.code: fault for fault in (*SHIFTS, *VALUES, *SUBTLE, *SOUND)}
)
"""Every fault that samples can carry, by its code."""

MODEL_FAULTS: Mapping[str, ModelFault] = MappingProxyType({fault.code: fault for fault in MODELLED})
"""Every fault that takes a model to plant, by its code."""
