"""Fixtures that every test module may use."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).parent.parent

# A busy machine is no failure, and a run of record is one that can be repeated.
settings.register_profile("quiet", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("quiet")

# Everything here is tiny: a second thread only waits for the first.
torch.set_num_threads(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn; CUDA skips with the reason where there is none."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """What a real vLLM 0.32.0 replied, by server: `replies/` a call a file, `rollouts/` 32 rows a file."""
    return Path(__file__).parent / "data" / "vllm-0.32.0"


@pytest.fixture(scope="session")
def tinylm_dir() -> Path:
    """The model that those servers served."""
    return ROOT / "examples" / "tinylm"
