"""Corruptions, one a code: what goes wrong in other people's pipelines, planted on purpose into good samples.

Shared by the demonstration, the drill, the example and the tests. Knows records and nothing of the checks;
magnitudes and places are drawn from the generator that is passed.
"""

from collections.abc import Mapping
from types import MappingProxyType

from rlbatch.faults.layout import LAYOUT, LayoutFault
from rlbatch.faults.modelled import MODELLED
from rlbatch.faults.planting import Fault, ModelFault, NoPlaceError, Score, Scored
from rlbatch.faults.prefixes import PREFIXES
from rlbatch.faults.routing import ROUTING
from rlbatch.faults.sets import SETS, TRAINER_VERSION, SetFault
from rlbatch.faults.shifts import SHIFTS, shift
from rlbatch.faults.sound import SOUND
from rlbatch.faults.stops import STOPS
from rlbatch.faults.subtle import SUBTLE
from rlbatch.faults.turns import TURNS, TurnFault
from rlbatch.faults.values import VALUES

__all__ = [
    "FAULTS",
    "Fault",
    "LAYOUT_FAULTS",
    "LayoutFault",
    "MODEL_FAULTS",
    "ModelFault",
    "NoPlaceError",
    "ROUTING_FAULTS",
    "SET_FAULTS",
    "Score",
    "Scored",
    "SetFault",
    "TRAINER_VERSION",
    "TURN_FAULTS",
    "TurnFault",
    "shift",
]

FAULTS: Mapping[str, Fault] = MappingProxyType(
    {fault.code: fault for fault in (*SHIFTS, *VALUES, *SUBTLE, *PREFIXES, *SOUND, *STOPS)}
)
"""Every fault that samples can carry, by its code."""

MODEL_FAULTS: Mapping[str, ModelFault] = MappingProxyType({fault.code: fault for fault in MODELLED})
"""Every fault that takes a model to plant, by its code."""

SET_FAULTS: Mapping[str, SetFault | Fault] = MappingProxyType({fault.code: fault for fault in SETS})
"""Faults of a list of samples, or against `group_size`, `trainer_version` and `max_version_lag`, by code."""

LAYOUT_FAULTS: Mapping[str, LayoutFault] = MappingProxyType({fault.code: fault for fault in LAYOUT})
"""Faults of a packed or padded batch as arrays, by code."""

ROUTING_FAULTS: Mapping[str, Fault] = MappingProxyType({fault.code: fault for fault in ROUTING})
"""Faults of samples that have routed experts, by code."""

TURN_FAULTS: Mapping[str, TurnFault] = MappingProxyType({fault.code: fault for fault in TURNS})
"""Faults that turns show and no sample keeps, by code."""
