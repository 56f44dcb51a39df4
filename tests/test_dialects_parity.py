"""The trainers' own code on our dicts: what it computed, against the same worked out from the batch.

`tests/data/parity` holds each question and the answer of the real code. With RLBATCH_PARITY_TRL_PYTHON (or
..._VERL_, ..._PRIME_RL_, ..._TINKER_PYTHON) naming an interpreter that has the trainer, it is asked again.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import sample, trajectory, turn
from parity.peer_io import from_json, to_json

from rlbatch.assemble import to_samples
from rlbatch.batch import Batch
from rlbatch.collate import collate
from rlbatch.dialects import as_dict
from rlbatch.records import Sample

HERE = Path(__file__).parent
PEERS = ("trl", "verl", "prime_rl", "tinker")
CLIP = 0.2
"""TRL's and verl's default, on both sides."""
THRESHOLDS = [number / 1000 for number in range(-1000, 1001)]
"""Nats; at how many of them TRL keeps a row tells the row's mean difference to a thousandth."""
PRIME_MASK, PRIME_TAU = 0.2, 1e-3
"""prime-rl's defaults: of the probability difference, and of the squared log ratio."""


def samples_for(peer: str) -> list[Sample]:
    """Four samples: two turns with a tool's token between, one untrained token, one of few tokens."""
    rng = np.random.default_rng(7)

    def logprobs(count: int) -> list[float]:
        return (-rng.gamma(1.0, 0.8, count)).tolist()

    first = turn([1, 5, 9], [7, 2], logprobs(2))
    second = turn([1, 5, 9, 7, 2, 3], [4, 6, 8], logprobs(3))
    samples = to_samples(trajectory(first, second, trajectory_id="a", advantage=1.25))
    samples += [
        sample([1], [8, 3, 3, 2, 9, 4], logprobs(6), trajectory_id="b", advantage=-0.75),
        sample([1, 4, 4, 2], [8], logprobs(1), trajectory_id="c", advantage=-1.5),
        sample([3, 2], [5, 5, 6], logprobs(3), trajectory_id="d", advantage=0.5),
    ]
    untrained = samples[1].loss_mask.copy()
    untrained[3] = False
    samples[1] = replace(samples[1], loss_mask=untrained)
    changed = []
    for made in samples:
        moved = made.inference_logprobs + rng.normal(0, 0.2, len(made)).astype(np.float32)
        fields = {"proximal_logprobs": moved} if peer in ("trl", "verl") else {}
        if peer == "prime_rl":
            fields["routed_experts"] = rng.integers(0, 9, (len(made) - 1, 2, 3)).astype(np.uint8)
        changed.append(replace(made, **fields))
    return changed


def trainer_logprobs(samples: list[Sample]) -> list[np.ndarray]:
    """[T] by own token, NaN where not sampled: what a trainer might have computed."""
    rng = np.random.default_rng(8)
    return [made.inference_logprobs + rng.normal(0, 0.4, len(made)).astype(np.float32) for made in samples]


def question(peer: str) -> dict[str, object]:
    """Our dict, and the trainer's logprobs in the place where the peer's own code has them."""
    samples = samples_for(peer)
    form = as_dict(collate(samples, layout="packed" if peer == "prime_rl" else "padded"), peer)
    trainer = trainer_logprobs(samples)
    if peer == "prime_rl":
        # One row, by the position that predicts.
        rows = [np.append(values[1:], np.nan) for values in trainer]
        values = torch.from_numpy(np.nan_to_num(np.concatenate(rows), nan=-3.0).astype(np.float32))[None]
    elif peer == "tinker":
        values = [torch.from_numpy(np.nan_to_num(values[1:], nan=-3.0)) for values in trainer]
    else:
        # From the first sampled token on; NaN elsewhere would show where it is not masked.
        starts = [int(np.argmax(made.turn >= 0)) for made in samples]
        parts = [torch.from_numpy(row[start:]) for row, start in zip(trainer, starts, strict=True)]
        values = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-3.0).nan_to_num(-3.0)
    asked = {"form": form, "trainer_logprobs": values}
    return asked | {"thresholds": THRESHOLDS} if peer == "trl" else asked


def over_trained(peer: str) -> dict[str, np.ndarray]:
    """[N] float64 columns over the trained positions of the batch, and `row` of each: no peer's form."""
    samples = samples_for(peer)
    batch: Batch = collate(samples, layout="padded")
    theirs = [
        replace(made, inference_logprobs=own)
        for made, own in zip(samples, trainer_logprobs(samples), strict=True)
    ]
    trainer = collate(theirs, layout="padded").inference_logprobs
    mask = batch.loss_mask
    columns = {"trainer": trainer, "inference": batch.inference_logprobs, "advantage": batch.advantages}
    if batch.proximal_logprobs is not None:
        columns["proximal"] = batch.proximal_logprobs
    found = {name: values[mask].double().numpy() for name, values in columns.items()}
    return found | {"row": mask.nonzero()[:, 0].numpy()}


def clipped_loss(columns: dict[str, np.ndarray]) -> np.ndarray:
    """[N] PPO's clipped loss against the proximal policy."""
    ratio = np.exp(columns["trainer"] - columns["proximal"])
    clipped = np.clip(ratio, 1 - CLIP, 1 + CLIP)
    return -np.minimum(ratio * columns["advantage"], clipped * columns["advantage"])


def expected_trl(columns):
    losses = clipped_loss(columns)
    by_row = [losses[columns["row"] == row].mean() for row in range(4)]
    num_kept = []
    for row in range(4):
        mine = columns["row"] == row
        kl = (columns["inference"] - columns["trainer"])[mine].mean()
        negative = columns["advantage"][mine][0] < 0
        num_kept.append(sum(not negative or kl <= threshold for threshold in THRESHOLDS))
    return {"dapo": losses.mean(), "bnpo": losses.mean(), "grpo": np.mean(by_row), "num_kept": num_kept}


def expected_verl(columns):
    log_ratio = columns["proximal"] - columns["inference"]
    return {
        "kl": -log_ratio.mean(),
        "k3_kl": (np.exp(log_ratio) - 1 - log_ratio).mean(),
        "loss": clipped_loss(columns).mean(),
        "positions_agree": True,
    }


def expected_prime_rl(columns):
    log_ratio = columns["trainer"] - columns["inference"]
    difference = np.exp(columns["trainer"]) - np.exp(columns["inference"])
    up = columns["advantage"] > 0
    kept = ~np.where(up, difference > PRIME_MASK, difference < -PRIME_MASK)
    each = -1.0 * kept * columns["advantage"] * np.exp(log_ratio) + PRIME_TAU * log_ratio**2
    num_tokens = sum(len(made) for made in samples_for("prime_rl"))
    losses = [each[columns["row"] == row].sum() for row in range(4)]
    return {"losses": losses, "experts_shape": [num_tokens, 2, 3]}


def expected_tinker(columns):
    difference = columns["inference"] - columns["trainer"]
    return {"v1": difference.mean(), "v2": 0.5 * (difference**2).mean()}


EXPECTED = {
    "trl": expected_trl,
    "verl": expected_verl,
    "prime_rl": expected_prime_rl,
    "tinker": expected_tinker,
}


def ask(peer: str, python: str) -> dict[str, object]:
    """The peer's answer to our question of today."""
    done = subprocess.run(
        [python, str(HERE / "parity" / f"peer_{peer}.py")],
        input=json.dumps(to_json(question(peer))),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def recorded(peer: str) -> dict[str, object]:
    return json.loads((HERE / "data" / "parity" / f"{peer}.json").read_text())


@pytest.mark.parametrize("peer", PEERS)
def test_our_dict_is_the_one_that_the_real_code_was_given(peer):
    assert to_json(question(peer)) == recorded(peer)["question"]
    assert to_json(from_json(recorded(peer)["question"])) == recorded(peer)["question"]


@pytest.mark.parametrize("peer", PEERS)
def test_the_real_code_computes_what_the_batch_says(peer):
    answer = recorded(peer)["answer"]
    expected = EXPECTED[peer](over_trained(peer))
    assert answer.keys() == expected.keys()
    for key, value in expected.items():
        assert answer[key] == pytest.approx(value, rel=2e-5, abs=1e-6), key


READ = {peer: ("trainer", "inference", "proximal", "advantage") for peer in ("trl", "verl")}
READ |= {"prime_rl": ("trainer", "inference", "advantage"), "tinker": ("trainer", "inference")}
"""Columns that the peer's answer depends on."""


@pytest.mark.parametrize(("peer", "column"), [(peer, name) for peer, names in READ.items() for name in names])
def test_a_column_one_place_off_would_show(peer, column):
    columns = over_trained(peer)
    expected = EXPECTED[peer](columns | {column: np.roll(columns[column], 1)})
    answer = recorded(peer)["answer"]
    assert any(answer[key] != pytest.approx(value, rel=1e-3) for key, value in expected.items())


@pytest.mark.parametrize("peer", PEERS)
def test_the_real_code_still_answers_the_same(peer):
    variable = f"RLBATCH_PARITY_{peer.upper()}_PYTHON"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no interpreter that has it")
    answer = ask(peer, os.environ[variable])
    for key, value in recorded(peer)["answer"].items():
        assert answer[key] == pytest.approx(value, rel=1e-6), key
