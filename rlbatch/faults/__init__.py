"""Corruptions, one a code: what goes wrong in other people's pipelines, planted on purpose into good samples.

Shared by the demonstration, the example and the tests. Knows records and nothing of the checks; magnitudes
and places are drawn from the generator that is passed.
"""

from collections.abc import Mapping
from types import MappingProxyType

from rlbatch.faults.aligned import ALIGNED, shift
from rlbatch.faults.planting import Fault
from rlbatch.faults.sets import SETS, TRAINER_VERSION, SetFault
from rlbatch.faults.sound import SOUND

__all__ = ["FAULTS", "Fault", "SET_FAULTS", "SetFault", "TRAINER_VERSION", "shift"]

FAULTS: Mapping[str, Fault] = MappingProxyType({fault.code: fault for fault in (*ALIGNED, *SOUND)})
"""Every fault that one sample can carry, by its code."""

SET_FAULTS: Mapping[str, SetFault | Fault] = MappingProxyType({fault.code: fault for fault in SETS})
"""Faults of a list of samples, or against `group_size`, `trainer_version` and `max_version_lag`, by code."""
