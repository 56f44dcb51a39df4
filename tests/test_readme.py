"""What the README shows works as it stands."""

import json
import re
from pathlib import Path

import torch

README = (Path(__file__).parent.parent / "README.md").read_text()


def block(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, marker
    return found[1]


def test_the_loop_in_the_readme_runs_and_gives_gradients(tmp_path, monkeypatch, data_dir, tinylm_dir):
    from rlbatch.scoring import load_model

    monkeypatch.chdir(tmp_path)
    model = load_model(tinylm_dir, device="cpu", dtype=torch.float32)
    recording = json.loads((data_dir / "replies/fp32_raw/completions_n2_t1.json").read_text())
    names = {"reply": recording["response"], "model": model, "advantages": [1.0, -1.0]}
    exec(compile(block("loop"), "README.md", "exec"), names)
    (batch,) = names["batches"]
    assert (batch.num_loss_tokens, batch.num_trajectories) == (16, 2)
    torch.testing.assert_close(names["ratio"], torch.ones_like(names["ratio"]), atol=1e-4, rtol=0)
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_it_is_short_and_its_commands_are_marked():
    assert len(README.splitlines()) < 200
    for marker in ("audit", "tests"):
        assert block(marker).count("\n") == 1
