"""Exact tokens and logprobs, from the engine to the loss; misalignment is a hard error before backprop.

Here are the names that need no torch. The trainer's side is imported by module: `rlbatch.loader`,
`rlbatch.collate`, `rlbatch.scoring`, `rlbatch.alignment`.
"""

from rlbatch.assemble import prefix_findings, to_samples
from rlbatch.catalogue import CATALOGUE
from rlbatch.engines import ResponseAssembler, parse_response
from rlbatch.errors import (
    AlignmentError,
    Finding,
    PackingLeakError,
    RecordError,
    ReplyError,
    RlbatchError,
    ScoringError,
    SoundnessError,
    StorageError,
    Where,
)
from rlbatch.records import (
    LayoutArrays,
    MediaArray,
    Origin,
    Provenance,
    Sample,
    SamplingParams,
    Segment,
    Trajectory,
    Turn,
    Usage,
    VersionSpan,
    identical,
)
from rlbatch.soundness import (
    check_sound,
    check_sound_layout,
    check_sound_trajectory,
    require_sound,
    require_sound_layout,
    require_sound_trajectory,
)
from rlbatch.storage import open_reader, open_writer, write_shard

__all__ = [
    "AlignmentError",
    "CATALOGUE",
    "Finding",
    "LayoutArrays",
    "MediaArray",
    "Origin",
    "PackingLeakError",
    "Provenance",
    "RecordError",
    "ReplyError",
    "ResponseAssembler",
    "RlbatchError",
    "Sample",
    "SamplingParams",
    "ScoringError",
    "Segment",
    "SoundnessError",
    "StorageError",
    "Trajectory",
    "Turn",
    "Usage",
    "VersionSpan",
    "Where",
    "check_sound",
    "check_sound_layout",
    "check_sound_trajectory",
    "identical",
    "open_reader",
    "open_writer",
    "parse_response",
    "prefix_findings",
    "require_sound",
    "require_sound_layout",
    "require_sound_trajectory",
    "to_samples",
    "write_shard",
]
