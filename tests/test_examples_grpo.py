"""`examples/grpo.py`: it samples what it says, trains where all is well, and stops where a fault is planted.

That it learns is shown by running it; here a step is only a few prompts.
"""

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from rlbatch.collate import collate
from rlbatch.errors import AlignmentError, RlbatchError
from rlbatch.faults import FAULTS, Fault
from rlbatch.records import Provenance, Sample, SamplingParams
from rlbatch.scoring import load_model, model_vocab_size
from rlbatch.storage import open_reader, write_shard

ROOT = Path(__file__).parent.parent
WARN_ONLY = {
    "low-precision-logprobs",
    "ratio-tail",
    "turn-prefix-broken",
    "version-gap",
    "version-mixed",
}
"""Findings of warning level: a step goes on."""
NOT_IN_SHORT_ROWS = {
    # Answers of some ten tokens hold no whole block of a prefix cache and no second version.
    "mixed-versions",
    "prefix-cache-rubbish",
    # Nor does what another beginning does to later tokens stand out in them.
    "prefix-differs",
    # All prompts are of one length: a lag by their lengths is the same in every row.
    "shifted-by-rule",
}
"""Faults that the example's rollouts cannot show; the drill plants them into longer ones."""


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("grpo_example", ROOT / "examples" / "grpo.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    # As where the program is run: what lies beside it can be imported.
    sys.path.insert(0, str(ROOT / "examples"))
    spec.loader.exec_module(example)
    yield example
    sys.path.remove(str(ROOT / "examples"))
    del sys.modules[spec.name]


@pytest.fixture
def grpo(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example with small steps; 64 completions are still above the 1,000 tokens that limits need."""
    monkeypatch.setattr(module, "NUM_PROMPTS", 8)
    monkeypatch.setattr(module, "NUM_HELD_OUT", 8)
    return module


@pytest.fixture
def model(tinylm_dir: Path) -> PreTrainedModel:
    return load_model(tinylm_dir, device="cpu", dtype=torch.float32)


def settings(grpo: ModuleType, rollouts: Path, **changes: Any) -> Any:
    chosen: dict[str, Any] = {"seed": 0, "steps": 1, "lag": 0, "layout": "packed", "plant": None}
    return grpo.Settings(**{**chosen, "unchecked": False, "rollouts": rollouts, **changes})


def parameters(model: PreTrainedModel) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.parameters()]


def same(before: list[torch.Tensor], model: PreTrainedModel) -> bool:
    return all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


class FromTheSecondTime:
    """A fault that leaves the first step's samples as they are."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._num_calls = 0

    def plant(self, samples: list[Sample], rng: np.random.Generator) -> list[Sample]:
        self._num_calls += 1
        return samples if self._num_calls == 1 else self._fault.plant(samples, rng)


# -- the task --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (" So 3 * 5 = 15.\n#### 15", 1.0),
        (" So 3 * 5 = 16.\n#### 16", 1.0),
        (" So 3 * 5 = 15.\n#### 16", 0.0),
        (" 2 + 2 = 4, 4 + 1 = 5.\n#### 4", 0.0),
        (" 2 - 5 = -3.\n#### -3", 1.0),
        (" So 3 * 5 = 15.", 0.0),
        (" Fifteen.\n#### 15", 0.0),
        (" So 3 * 5 = 15.\n#### 15 apples", 0.0),
    ],
)
def test_reward_asks_whether_the_answer_is_the_last_result(
    grpo: ModuleType, completion: str, reward: float
) -> None:
    assert grpo.reward_of(completion) == reward


def test_advantages_compare_a_completion_with_its_own_group(grpo: ModuleType) -> None:
    # [1, 0, 0, 1]: mean 1/2, deviation with n - 1 is sqrt(1/3). A group of equals teaches nothing.
    found = grpo.group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]))
    unit = 0.5 / math.sqrt(1 / 3)
    assert found[0].tolist() == pytest.approx([unit, -unit, -unit, unit], rel=1e-5)
    assert found[1].tolist() == [0.0] * 4


def test_held_out_prompts_are_about_other_things_than_training_prompts(grpo: ModuleType) -> None:
    trained = grpo.make_prompts(400, grpo.THINGS, np.random.default_rng(1))
    held_out = grpo.make_prompts(400, grpo.HELD_OUT_THINGS, np.random.default_rng(1))
    assert not set(trained) & set(held_out)
    assert not any(thing in prompt for prompt in trained for thing in grpo.HELD_OUT_THINGS)


# -- sampling --------------------------------------------------------------------------------------------


def test_drawn_logprobs_are_those_of_each_completion_alone_in_float64(
    grpo: ModuleType, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prompts of unequal lengths, so that padding and cache would show; truth: no padding, no cache, float64.
    monkeypatch.setattr(grpo, "TEMPERATURE", 0.7)
    tokenizer = AutoTokenizer.from_pretrained(grpo.MODEL_DIR)
    texts = [
        "Question: There are 3 boxes with 5 pens each. How many pens in total?\nAnswer:",
        "Question:",
        "A",
    ]
    prompts = [tokenizer.encode(text) for text in texts]
    assert len({len(prompt) for prompt in prompts}) == 3
    turns = grpo.sample_turns(model, prompts, 4, torch.Generator().manual_seed(0))
    exact = model.double()
    for prompt, turn in zip(prompts, turns, strict=True):
        assert turn.prompt_token_ids.tolist() == prompt
        completion = torch.from_numpy(turn.completion_token_ids.astype(np.int64))
        with torch.no_grad():
            logits = exact(torch.tensor([prompt + completion.tolist()])).logits[0, len(prompt) - 1 : -1]
        truth = (logits / 0.7).log_softmax(-1).gather(1, completion[:, None])[:, 0]
        assert np.abs(turn.inference_logprobs - truth.numpy()).max() < 2e-5
        assert [(span.label, span.start, span.stop) for span in turn.policy_versions] == [
            ("4", 0, len(completion))
        ]


def test_completions_end_with_their_first_stop_token(grpo: ModuleType, model: PreTrainedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(grpo.MODEL_DIR)
    texts = grpo.make_prompts(24, grpo.THINGS, np.random.default_rng(0))
    prompts = [tokenizer.encode(text) for text in texts]
    turns = grpo.sample_turns(model, prompts, 0, torch.Generator().manual_seed(0))
    stopped = [turn for turn in turns if turn.finish_reason == "stop"]
    assert stopped
    for turn in turns:
        *inner, last = turn.completion_token_ids.tolist()
        # 2 and 4 are the end tokens of this model's generation_config.json.
        assert not {2, 4} & set(inner)
        assert (last in (2, 4)) == (turn.finish_reason == "stop")
        assert turn.finish_reason == "stop" or len(inner) + 1 == grpo.MAX_NEW_TOKENS


# -- the loss --------------------------------------------------------------------------------------------


def test_loss_clips_what_gains_and_never_what_loses(grpo: ModuleType) -> None:
    # ratio 1.5 at advantage 1 gains 1.2, flat; 1.5 at -1 gains -1.5; 0.5 at -1 gains -0.8, flat.
    ratios, advantages = [1.5, 1.5, 0.5], [1.0, -1.0, -1.0]
    inference = np.log(np.array([0.2, 0.2, 0.2], np.float32))
    sample = Sample(
        token_ids=np.array([1, 5, 6, 7], np.int32),
        inference_logprobs=np.array([np.nan, *inference], np.float32),
        loss_mask=np.array([False, True, True, True]),
        advantages=np.array([0.0, *advantages], np.float32),
        policy_version=np.array([-1, 0, 0, 0], np.int32),
        temperature=np.ones(4, np.float32),
        turn=np.array([-1, 0, 0, 0], np.int16),
        sample_id="a",
        trajectory_id="a",
        provenances=(
            Provenance(engine="hand", logprobs_mode="processed", sampling=SamplingParams(temperature=1.0)),
        ),
    )
    batch = collate([sample], layout="packed")
    values = [math.log(0.2 * ratio) for ratio in ratios]
    logprobs = torch.tensor([[*values, 0.0]], requires_grad=True)
    loss = grpo.clipped_loss(logprobs, batch, 10)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.2 - 1.5 - 0.8) / 10, rel=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, 1.5 / 10, 0.0, 0.0], rel=1e-5)


# -- steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_gate_finds_the_sampling_policy_unchanged_at_lag_0(
    grpo: ModuleType, model: PreTrainedModel, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "TEMPERATURE", 0.8)
    shard = tmp_path / "0.safetensors"
    write_shard(shard, grpo.Rollouts(model, 0).groups(0))
    batches = grpo.load_batches(shard, settings(grpo, tmp_path, layout=layout), model_vocab_size(model))
    assert len(batches) > 1
    metrics = grpo.gate(model, batches, 0).metrics
    assert metrics["rlbatch/num_tokens/version_lag_0"] == sum(batch.num_loss_tokens for batch in batches)
    assert metrics["rlbatch/inference_kld/mean"] < 1e-6
    assert metrics["rlbatch/abs_log_ratio/max"] < 1e-4


def test_steps_train_on_up_to_two_versions_old_rollouts_without_an_error(
    grpo: ModuleType, model: PreTrainedModel, tmp_path: Path
) -> None:
    before = parameters(model)
    lines = list(grpo.train(model, settings(grpo, tmp_path, steps=3, lag=2)))
    assert not same(before, model)
    ages = [[age for age in range(5) if f"at lag {age}" in line] for line in lines[1:-1]]
    assert ages == [[0], [0, 1], [0, 1, 2]]
    versions = [set(sample.policy_version[sample.turn >= 0]) for sample in open_reader(tmp_path)]
    assert versions == [{version} for version in range(3) for _ in range(64)]


@pytest.mark.parametrize("code", sorted(set(FAULTS) - WARN_ONLY - NOT_IN_SHORT_ROWS))
def test_planted_fault_stops_before_the_first_backward(
    grpo: ModuleType, model: PreTrainedModel, tmp_path: Path, code: str
) -> None:
    before = parameters(model)
    with pytest.raises(RlbatchError) as caught:
        list(grpo.train(model, settings(grpo, tmp_path, plant=code)))
    assert caught.value.code == code
    assert same(before, model)
    assert all(value.grad is None for value in model.parameters())


def test_planted_fault_is_named_among_older_rollouts(
    grpo: ModuleType, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "FAULTS", {"shifted": FromTheSecondTime(FAULTS["shifted"])})
    with pytest.raises(AlignmentError) as caught:
        list(grpo.train(model, settings(grpo, tmp_path, steps=2, lag=2, plant="shifted")))
    # Sound rollouts of step 0 are in the same step, one version old, and are not accused.
    assert {finding.where.path for finding in caught.value.findings} == {str(tmp_path / "000001.safetensors")}


def test_faults_of_warning_level_are_told_and_the_step_goes_on(
    grpo: ModuleType, model: PreTrainedModel, tmp_path: Path
) -> None:
    lines = list(grpo.train(model, settings(grpo, tmp_path, plant="ratio-tail")))
    assert "x ratio-tail" in lines[1]


def test_unchecked_the_shifted_rollouts_change_the_weights(
    grpo: ModuleType, model: PreTrainedModel, tmp_path: Path
) -> None:
    before = parameters(model)
    list(grpo.train(model, settings(grpo, tmp_path, plant="shifted", unchecked=True)))
    assert not same(before, model)


def test_program_exits_1_with_the_error_on_stderr(tmp_path: Path) -> None:
    program = ROOT / "examples" / "grpo.py"
    run = subprocess.run(
        [sys.executable, program, "--steps", "3", "--plant", "shifted", "--rollouts", tmp_path / "new"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("AlignmentError: [shifted] ")
    assert "Traceback" not in run.stderr
    assert [line.split()[0] for line in run.stdout.splitlines()] == ["held-out"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["000000.safetensors"]
