"""Small records for tests, every value spelled out by the test that wants another one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlbatch.assemble import to_samples
from rlbatch.records import Provenance, Sample, SamplingParams, Trajectory, Turn

NEUTRAL = SamplingParams(temperature=1.0)


def provenance(**changes: Any) -> Provenance:
    return Provenance(**{"engine": "vllm", "logprobs_mode": "processed", "sampling": NEUTRAL} | changes)


def turn(prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], **changes: Any) -> Turn:
    """A turn whose logprobs lie where its provenance puts them."""
    how = changes.get("provenance", provenance())
    values = np.array(logprobs, np.float32)
    behaviour = how.gives_behaviour_logprobs
    fields = {
        "prompt_token_ids": np.array(prompt, np.int32),
        "completion_token_ids": np.array(ids, np.int32),
        "inference_logprobs": values if behaviour else np.full(len(values), np.nan, np.float32),
        "raw_inference_logprobs": None if behaviour else values,
        "provenance": how,
    }
    return Turn(**fields | changes)


def trajectory(*turns: Turn, **changes: Any) -> Trajectory:
    return Trajectory(**{"trajectory_id": "t0", "turns": turns, "advantage": 0.0} | changes)


def sample(prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], **changes: Any) -> Sample:
    """The one sample of a trajectory of one turn."""
    names = {"trajectory_id", "group_id", "reward", "advantage"}
    of_trajectory = {name: changes.pop(name) for name in names & set(changes)}
    (made,) = to_samples(trajectory(turn(prompt, ids, logprobs, **changes), **of_trajectory))
    return made


def recorded_samples(path: Path, how: Provenance) -> list[Sample]:
    """Every row of a recorded rollout file, read here by hand."""
    rows = json.loads(path.read_text())["rows"]
    return [
        sample(row["prompt_ids"], row["ids"], row["lp"], provenance=how, trajectory_id=f"row{index}")
        for index, row in enumerate(rows)
    ]


def recorded_provenance(path: Path) -> Provenance:
    """How a recorded rollout file came to be: its server's mode is known from the recording's manifest."""
    content = json.loads(path.read_text())
    sampling = {
        name: value
        for name, value in content["sampling"].items()
        if name in ("temperature", "top_p", "top_k")
    }
    mode = "processed" if "processed" in content["server"] else "raw"
    return provenance(
        logprobs_mode=mode, sampling=SamplingParams(**{"temperature": 1.0} | sampling), vocab_size=1536
    )
