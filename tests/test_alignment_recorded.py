"""The gate on what a real engine sampled: clean files pass, every planted lag is named, nothing else is.

Trainer logprobs are computed here with plain logits and a float64 log_softmax, one row at a time, so that
they owe nothing to the library's own scoring.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import recorded_provenance, recorded_samples, sample
from kept_by_hand import kept_by_hand

from rlbatch.alignment import Judge, Limits, measure
from rlbatch.collate import collate
from rlbatch.faults import FAULTS
from rlbatch.figures import Figures

DATA = Path(__file__).parent / "data" / "vllm-0.32.0" / "rollouts"
FILES = sorted(path.stem for path in DATA.glob("*.json"))
OUTSIDE = ["bf16_processed__t1_topk20", "bf16_processed__t1_topp08"]
LOGITS = ["fp32_rawlogits__t1"]
MIN_TOKENS_NAMED = 16


@pytest.fixture(scope="module")
def model(tinylm_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tinylm_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def truth(model):
    """Trainer logprobs of every row of a file, at the temperature its values are compared at."""
    cache = {}

    def of(name):
        if name not in cache:
            content = json.loads((DATA / f"{name}.json").read_text())
            how = {} if "raw" in name else dict(content["sampling"])
            divisor = how.pop("temperature", 1.0)
            rules = {key: how[key] for key in ("top_k", "top_p") if key in how}
            cache[name] = [
                score(model, row["prompt_ids"], row["ids"], divisor, rules) for row in content["rows"]
            ]
        return cache[name]

    return of


def score(model, prompt, ids, divisor, rules):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0].double() / divisor
    logits = logits[len(prompt) - 1 : -1]
    if rules:
        for row in logits:
            outside = torch.ones(len(row), dtype=torch.bool)
            outside[kept_by_hand(row.tolist(), **rules)] = False
            row[outside] = -torch.inf
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()


def judge(samples, trainer_rows, *, layout="padded", limits=None):
    """One verdict over samples whose sampled tokens have these trainer logprobs."""
    batch = collate(samples, layout=layout, purpose="audit")
    trainer = torch.zeros(batch.shape, dtype=torch.float64)
    for segment, values in zip(batch.host_segments, trainer_rows, strict=True):
        trainer[segment.row, segment.start : segment.stop] = torch.from_numpy(values)
    judge = Judge(trainer_version=None, limits=limits or Limits())
    measured = measure(batch, trainer)
    judge.add(measured)
    figures = Figures.of(measured.ratio.log_ratio[measured.compared].numpy())
    return judge.verdict(), figures


def clean_samples(name):
    path = DATA / f"{name}.json"
    return recorded_samples(path, recorded_provenance(path))


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", FILES)
def test_a_clean_file_is_judged_sound_or_not_judged(name, layout, truth):
    verdict, figures = judge(clean_samples(name), truth(name), layout=layout)
    found = {(item.code, item.severity) for item in verdict.findings}
    if name in LOGITS:
        assert found == {("logprob-positive", "error")}
    elif name in OUTSIDE:
        # Each file has one row or two in which bf16 drew a token just outside the float32 trainer's set.
        assert found == {("outside-kept-set", "warning")}
        assert verdict.judged is True
        assert figures.k3 < 1e-4
        outside = sum(int(np.isneginf(row).sum()) for row in truth(name))
        assert 1 <= outside <= 2
        assert verdict.metrics["rlbatch/num_outside_kept_set/sum"] == outside
    else:
        assert found == set()
        assert verdict.judged is True
        if name.startswith("fp32"):
            assert figures.max_abs_log_ratio < 1e-4
            assert figures.k3 < 1e-10
        else:
            assert figures.k3 < 1e-4


def planted_rows(name, lag):
    """Each row with its lag planted as the issue says, its own trainer logprobs beside it."""
    content = json.loads((DATA / f"{name}.json").read_text())
    how = recorded_provenance(DATA / f"{name}.json")
    for index, row in enumerate(content["rows"]):
        prompt, ids, logprobs = row["prompt_ids"], row["ids"], row["lp"]
        if lag > 0:
            prompt, ids, logprobs, kept = prompt, ids[:-1], logprobs[1:], slice(None, -1)
        else:
            prompt, ids, logprobs, kept = prompt + ids[:1], ids[1:], logprobs[:-1], slice(1, None)
        if ids:
            yield index, kept, sample(prompt, ids, logprobs, provenance=how, trajectory_id=f"row{index}")


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("lag", [1, -1])
@pytest.mark.parametrize("name", [name for name in FILES if name not in LOGITS])
def test_a_planted_lag_is_named_with_its_sign_in_every_row_of_sixteen_tokens(name, lag, layout, truth):
    planted = list(planted_rows(name, lag))
    samples = [made for _, _, made in planted]
    verdict, _ = judge(samples, [truth(name)[index][kept] for index, kept, _ in planted], layout=layout)
    shifted = {item.where.sample: item.found for item in verdict.findings if item.code == "shifted"}
    assert all(f"at lag {lag:+d}," in found for found in shifted.values())
    # A token outside the trainer's kept set is no witness, and one row has hardly another.
    outside = {index for index, values in enumerate(truth(name)) if np.isneginf(values).any()}
    long = {
        i
        for i, (index, _, made) in enumerate(planted)
        if int(made.loss_mask.sum()) >= MIN_TOKENS_NAMED and index not in outside
    }
    assert len(outside) <= 2
    assert len(long) >= 6
    assert long <= set(shifted)
    # A row of a few tokens may have too few witnesses for a lag; of a long row nothing else is said.
    assert {item.code for item in verdict.findings if item.where.sample in long} == {"shifted"}


# A drift of one row is within the limits of the whole: kld-high is planted in all of them only.
ONE_AND_ALL = [
    (code, share)
    for code in ("shifted", "shifted-from", "zero-filled", "unexplained", "ratio-tail")
    for share in (0.01, 1.0)
]


@pytest.mark.parametrize(("code", "share"), [*ONE_AND_ALL, ("kld-high", 1.0)])
def test_a_planted_fault_is_named_and_nothing_else_is_said(code, share, truth):
    # A change inside a row needs a row that is long on both sides of it.
    name = "fp32_raw__long400" if code == "shifted-from" else "fp32_raw__t1"
    clean = clean_samples(name)
    for seed in range(3):
        planted = FAULTS[code].plant(clean, np.random.default_rng(seed), share=share)
        # Where a shift left an edge token without a value, the trainer's value of it goes too.
        rows = [v[made.turn[-len(v) :] >= 0] for made, v in zip(planted, truth(name), strict=True)]
        # 604 tokens: only where drift itself is planted may the limits apply to so few.
        verdict, _ = judge(planted, rows, limits=Limits(min_tokens=500 if code == "kld-high" else 1000))
        # A tail in every row moves the mean ratio too, which is of no one row.
        of_mean = {"ratio-mean-off"} if (code, share) == ("ratio-tail", 1.0) else set()
        findings = [item for item in verdict.findings if item.code not in of_mean]
        assert {item.code for item in findings} == {code}
        changed = {i for i, (new, old) in enumerate(zip(planted, clean, strict=True)) if new is not old}
        if code != "kld-high":
            assert {item.where.sample for item in findings} <= changed
        if code in ("shifted", "shifted-from", "zero-filled"):
            assert {item.where.sample for item in verdict.findings} == changed


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize(("scale", "low", "high"), [(0.2, 0.002, 0.004), (0.8, 0.02, 0.05)])
def test_noise_of_a_healthy_run_proposes_no_cause(scale, low, high, heavy, truth):
    """Trainer logits perturbed to an inference KLD of about 0.003 and 0.03, tokens as drawn."""
    rng = np.random.default_rng(0)
    klds = []
    for name in ("fp32_raw__t1", "fp32_processed__t07", "bf16_raw__t13"):
        for _ in range(5):
            noisy = []
            for values in truth(name):
                noise = rng.standard_t(3, len(values)) / np.sqrt(3) if heavy else rng.normal(size=len(values))
                # A logit that moves by z moves its own logprob by (1 - p) z.
                noisy.append(np.minimum(values - scale * np.expm1(values) * noise, 0))
            verdict, figures = judge(clean_samples(name), noisy)
            klds.append(figures.inference_kld_capped)
            assert [item.code for item in verdict.findings if item.severity == "error"] == []
    assert low < np.mean(klds) < high
