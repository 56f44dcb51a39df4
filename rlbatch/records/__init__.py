"""The nouns: `Turn -> Trajectory -> Sample`, with `Provenance` and the one list of per-token fields.

Construction checks structure only (types, dtypes, equal lengths, ids >= 0) and raises `RecordError`.
Whether values make sense is for `rlbatch.soundness` to say, so that faults can be represented and named.
Knows nothing of engines, files or tensors; numpy only.
"""

from rlbatch.records.comparison import identical
from rlbatch.records.layout import ALIGNS, LayoutArrays
from rlbatch.records.media import MEDIA_DTYPES, MediaArray
from rlbatch.records.provenance import (
    LOGPROBS_MODES,
    PURPOSES,
    LogprobsMode,
    Provenance,
    Purpose,
    SamplingParams,
)
from rlbatch.records.sample import Origin, Sample, Segment, check_samples, origins_of, sampled_segments
from rlbatch.records.stretch import StoredSamples, Stretch
from rlbatch.records.structure import EXPERT_DTYPES
from rlbatch.records.token_fields import TOKEN_FIELDS, UNKNOWN_VERSION, Align, TokenField
from rlbatch.records.turn import (
    FINISH_REASONS,
    FinishReason,
    StopReason,
    Trajectory,
    Turn,
    Usage,
    VersionSpan,
)

__all__ = [
    "ALIGNS",
    "Align",
    "EXPERT_DTYPES",
    "FINISH_REASONS",
    "FinishReason",
    "LOGPROBS_MODES",
    "LayoutArrays",
    "LogprobsMode",
    "MEDIA_DTYPES",
    "MediaArray",
    "Origin",
    "PURPOSES",
    "Provenance",
    "Purpose",
    "Sample",
    "SamplingParams",
    "Segment",
    "StopReason",
    "StoredSamples",
    "Stretch",
    "TOKEN_FIELDS",
    "TokenField",
    "Trajectory",
    "Turn",
    "UNKNOWN_VERSION",
    "Usage",
    "VersionSpan",
    "check_samples",
    "identical",
    "origins_of",
    "sampled_segments",
]
