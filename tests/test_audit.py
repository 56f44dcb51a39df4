"""The audit, on what a real vLLM server sampled and on the same with faults planted."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlbatch.audit import AuditOptions, Scorer, audit, load_scorer, slices
from rlbatch.errors import Finding, ScoringError, StorageError
from rlbatch.faults import FAULTS, shift
from rlbatch.records import LogprobsMode, Sample
from rlbatch.report import FileReport, Verdict
from rlbatch.storage import open_writer, write_shard
from rlbatch.storage.recordings import Row, read_recording
from rlbatch.storage.statements import Statement


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The model is too small to share out: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def scorer(tinylm_dir: Path) -> Scorer:
    return load_scorer(tinylm_dir, device="cpu", dtype=torch.float32)


@pytest.fixture
def samples(data_dir: Path, scorer: Scorer) -> list[Sample]:
    """32 rollouts of the plain softmax, their model in their provenance."""
    path = data_dir / "rollouts" / "fp32_raw__t1.json"
    rows = read_recording(path, mode("raw"), identity=scorer.identity)
    return [row.sample for row in rows if row.sample is not None]


def mode(logprobs_mode: LogprobsMode) -> Statement:
    return Statement(engine="vllm", logprobs_mode=logprobs_mode)


def settings(
    *, max_tokens: int = 16384, statement: Statement | None = None, trainer_version: int | None = None
) -> AuditOptions:
    return AuditOptions(
        max_tokens=max_tokens, statement=statement or Statement(), trainer_version=trainer_version
    )


def one(path: Path, scorer: Scorer, options: AuditOptions | None = None) -> FileReport:
    (report,) = audit([path], scorer, options or settings()).files
    return report


def stored(tmp_path: Path, samples: list[Sample]) -> Path:
    path = tmp_path / "000000.safetensors"
    write_shard(path, samples)
    return path


def codes(findings: tuple[Finding, ...]) -> set[str]:
    return {found.code for found in findings}


# How each server was started, and whether its sampling kept the whole softmax: from the data's manifest.
# fp32 against fp32 leaves rounding; bf16 against fp32 was measured at 0.25 nats at most.
JUDGED = [
    *((f"fp32_raw__{name}", "raw", 1e-4) for name in ("t1", "t07", "t07_topp08", "t1_topk20", "t1_topp08")),
    ("fp32_raw__long400", "raw", 1e-4),
    *((f"fp32_processed__{name}", "processed", 1e-4) for name in ("t1", "t07", "t13")),
    *((f"bf16_raw__{n}", "raw", 0.25) for n in ("t1", "t07", "t13", "t07_topp08", "t1_topk20", "t1_topp08")),
    *((f"bf16_processed__{name}", "processed", 0.25) for name in ("t1", "t07")),
]
# The trainer's logprobs are taken over its own kept sets, and must then agree as closely as any.
JUDGED += [
    (f"fp32_processed__{name}", "processed", 1e-4) for name in ("t07_topp08", "t1_topk20", "t1_topp08")
]
# Sampled in bf16: each has a token or two just outside the sets of the float32 trainer.
OUTSIDE = [(f"bf16_processed__{name}", count) for name, count in (("t1_topk20", 2), ("t1_topp08", 1))]


@pytest.mark.parametrize(("name", "logprobs_mode", "limit"), JUDGED)
def test_real_rollouts_of_the_served_model_are_sound(
    data_dir: Path, scorer: Scorer, name: str, logprobs_mode: LogprobsMode, limit: float
) -> None:
    path = data_dir / "rollouts" / f"{name}.json"
    report = one(path, scorer, settings(statement=mode(logprobs_mode)))
    rows = json.loads(path.read_text())["rows"]
    assert (report.verdict, report.findings) == ("sound", ())
    assert report.num_samples == len(rows)
    assert report.figures.num_tokens == sum(len(row["ids"]) for row in rows)
    assert 0 < report.figures.max_abs_log_ratio < limit
    assert report.figures.k3 < (1e-10 if limit == 1e-4 else 1e-3)


@pytest.mark.parametrize(("name", "num_outside"), OUTSIDE)
def test_tokens_outside_the_trainers_kept_sets_are_counted_and_left_out(
    data_dir: Path, scorer: Scorer, name: str, num_outside: int
) -> None:
    path = data_dir / "rollouts" / f"{name}.json"
    report = one(path, scorer, settings(statement=mode("processed")))
    rows = json.loads(path.read_text())["rows"]
    assert report.verdict == "sound"
    assert codes(report.findings) == {"outside-kept-set"}
    assert {found.severity for found in report.findings} == {"warning"}
    assert sum(int(found.found.split()[0]) for found in report.findings) == num_outside
    assert report.figures.num_tokens == sum(len(row["ids"]) for row in rows) - num_outside
    assert report.figures.k3 < 1e-3
    assert report.figures.max_abs_log_ratio < 0.25


def test_what_has_a_penalty_too_is_not_judged(data_dir: Path, scorer: Scorer, tmp_path: Path) -> None:
    document = json.loads((data_dir / "rollouts" / "fp32_processed__t1_topk20.json").read_text())
    document["sampling"]["presence_penalty"] = 0.5
    path = tmp_path / "penalised.json"
    path.write_text(json.dumps(document))
    report = one(path, scorer, settings(statement=mode("processed")))
    assert report.verdict == "not-judged"
    assert codes(report.findings) == {"incomparable"}
    assert {found.severity for found in report.findings} == {"warning"}
    assert len(report.findings) == report.num_samples == 32
    assert report.figures.num_tokens == 0


def test_a_wrong_statement_about_top_k_is_seen_by_what_it_leaves_outside(
    data_dir: Path, scorer: Scorer, tmp_path: Path
) -> None:
    document = json.loads((data_dir / "rollouts" / "fp32_processed__t1_topk20.json").read_text())
    document["sampling"]["top_k"] = 5
    path = tmp_path / "misstated.json"
    path.write_text(json.dumps(document))
    report = one(path, scorer, settings(statement=mode("processed")))
    assert report.verdict == "not-judged"
    assert "outside-kept-set" in codes(report.findings)
    # A twelfth of the tokens were drawn from the fifteen that are no longer kept.
    assert 0.05 < 1 - report.figures.num_tokens / sum(len(row["ids"]) for row in document["rows"]) < 0.12


def test_raw_logits_are_told_by_their_sign(data_dir: Path, scorer: Scorer) -> None:
    path = data_dir / "rollouts" / "fp32_rawlogits__t1.json"
    report = one(path, scorer, settings(statement=mode("raw")))
    assert (report.verdict, codes(report.findings)) == ("findings", {"logprob-positive"})
    assert len(report.findings) == 32


def test_a_wrong_statement_about_the_mode_is_named_by_the_temperature_that_fits(
    data_dir: Path, scorer: Scorer
) -> None:
    # Sampled at 0.7: raw values said to be processed ones are compared at 0.7, and differ by up to 1.5 nats.
    path = data_dir / "rollouts" / "fp32_raw__t07.json"
    report = one(path, scorer, settings(statement=mode("processed")))
    assert (report.verdict, codes(report.findings)) == ("findings", {"temperature-mismatch"})
    assert "temperature 1, where 0.7 is stated" in report.findings[0].found
    assert report.figures.max_abs_log_ratio > 1


@pytest.mark.parametrize("name", [*(name for name, _, _ in JUDGED), *(name for name, _ in OUTSIDE)])
@pytest.mark.parametrize("lag", [1, -1])
def test_a_planted_lag_is_named_with_its_sign_in_every_row_of_sixteen_tokens(
    data_dir: Path, scorer: Scorer, tmp_path: Path, name: str, lag: int
) -> None:
    logprobs_mode: LogprobsMode = "processed" if "processed" in name else "raw"
    document = json.loads((data_dir / "rollouts" / f"{name}.json").read_text())
    for row in document["rows"]:
        if lag == 1:
            row["ids"], row["lp"] = row["ids"][:-1], row["lp"][1:]
        else:
            row["prompt_ids"].append(row["ids"][0])
            row["ids"], row["lp"] = row["ids"][1:], row["lp"][:-1]
    path = tmp_path / "planted.json"
    path.write_text(json.dumps(document))
    report = one(path, scorer, settings(statement=mode(logprobs_mode)))
    outside = {found.where.sample for found in report.findings if found.code == "outside-kept-set"}
    long = {at for at, row in enumerate(document["rows"]) if len(row["ids"]) >= 16} - outside
    named = {
        found.where.sample
        for found in report.findings
        if found.code == "shifted" and f"lag {lag:+d}" in found.found
    }
    wrong = [
        found for found in report.findings if found.code == "shifted" and f"lag {-lag:+d}" in found.found
    ]
    assert report.verdict == "findings"
    assert long <= named
    assert len(long) >= 6
    assert not wrong


def test_figures_leave_out_what_has_a_fault_and_findings_name_the_sample(
    scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    (spoilt,) = FAULTS["logprob-positive"].plant([samples[5]], np.random.default_rng(0))
    whole = one(stored(tmp_path, samples), scorer)
    (tmp_path / "spoilt").mkdir()
    report = one(stored(tmp_path / "spoilt", [*samples[:5], spoilt, *samples[6:]]), scorer)
    assert report.verdict == "findings"
    assert [(found.code, found.where.sample) for found in report.findings] == [("logprob-positive", 5)]
    assert report.findings[0].where.path == str(tmp_path / "spoilt" / "000000.safetensors")
    assert report.num_samples == 32
    assert report.figures.num_tokens == whole.figures.num_tokens - int(samples[5].loss_mask.sum())


@pytest.mark.parametrize(
    ("code", "verdict", "said"),
    [
        ("shifted", "findings", {"shifted"}),
        ("zero-filled", "findings", {"zero-filled"}),
        ("unexplained", "findings", {"unexplained"}),
        ("logprob-missing", "findings", {"logprob-missing"}),
        ("token-out-of-range", "findings", {"token-out-of-range"}),
        # Fewer than 1,000 tokens: no limit applies, but values that nobody drew from show in the mean ratio.
        ("kld-high", "not-judged", {"ratio-mean-off"}),
        ("ratio-tail", "not-judged", {"ratio-tail", "ratio-mean-off"}),
        ("nothing-trained", "not-judged", {"nothing-trained"}),
        # Raw values are compared at temperature 1 whatever was in force.
        ("incomparable", "sound", set()),
        ("greedy-sampled", "sound", set()),
    ],
)
def test_planted_faults_give_their_code_and_verdict(
    scorer: Scorer, tmp_path: Path, samples: list[Sample], code: str, verdict: Verdict, said: set[str]
) -> None:
    planted = FAULTS[code].plant(samples, np.random.default_rng(1))
    report = one(stored(tmp_path, planted), scorer)
    assert report.verdict == verdict
    assert codes(report.findings) == said


def test_few_tokens_that_are_not_clean_are_not_judged(
    scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    # 0.1 nats off on either side: over what counts as clean, and far from any limit. Near 0 there is no room.
    rng = np.random.default_rng(0)
    noisy = [
        replace(
            sample,
            inference_logprobs=np.where(
                sample.inference_logprobs < -0.2,
                sample.inference_logprobs + rng.choice(np.float32([-0.1, 0.1]), len(sample)),
                sample.inference_logprobs,
            ),
        )
        for sample in samples
    ]
    report = one(stored(tmp_path, noisy), scorer)
    assert (report.verdict, codes(report.findings)) == ("not-judged", {"too-few-to-judge"})
    assert "604 tokens" in report.findings[0].found
    assert report.figures.num_tokens == 604


def test_a_small_budget_and_a_large_one_give_the_same_figures(
    scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    path = stored(tmp_path, [*samples, shift(samples[3], 1)])
    small, large = (one(path, scorer, settings(max_tokens=budget)) for budget in (64, 10_000))
    assert small.figures.num_tokens == large.figures.num_tokens
    assert small.figures.k1 == pytest.approx(large.figures.k1, abs=1e-5)
    assert [found.where for found in small.findings] == [found.where for found in large.findings]


def test_a_sample_beyond_the_budget_names_itself_and_the_flag(
    scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    report = one(stored(tmp_path, samples), scorer, settings(max_tokens=40))
    first = next(at for at, sample in enumerate(samples) if len(sample) > 40)
    assert report.verdict == "unusable"
    assert codes(report.findings) == {"sample-too-long"}
    assert report.findings[0].where.sample == first
    assert "--max-tokens" in report.findings[0].fix


def test_slices_hold_every_row_once_and_close_at_the_budget(samples: list[Sample]) -> None:
    rows = [Row(index=at, sample=sample, share=0.0) for at, sample in enumerate(samples)]
    rows.insert(3, Row(index=99, sample=None, share=0.0))
    parts = list(slices(iter(rows), max_tokens=200))
    assert [row.index for part in parts for row in part] == [row.index for row in rows]
    lengths = [[0 if row.sample is None else len(row.sample) for row in part] for part in parts]
    assert all(sum(part[:-1]) < 200 for part in lengths)
    assert all(sum(part) >= 200 for part in lengths[:-1])


def test_rows_are_drawn_as_they_are_needed(samples: list[Sample]) -> None:
    drawn = []

    def rows() -> Iterator[Row]:
        for at, sample in enumerate(samples):
            drawn.append(at)
            yield Row(index=at, sample=sample, share=0.0)

    next(iter(slices(rows(), max_tokens=1)))
    assert drawn == [0]


def test_older_tokens_are_not_judged_against_the_limit_of_current_ones(
    scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    # 1,208 tokens of version 3, 0.45 nats off: a capped KLD of about 0.12, over the limit of 0.1.
    off = FAULTS["kld-high"].plant(samples * 2, np.random.default_rng(0))
    versioned = [
        replace(sample, policy_version=np.where(sample.turn >= 0, 3, -1).astype(np.int32)) for sample in off
    ]
    path = stored(tmp_path, versioned)

    def severities(version: int | None) -> set[tuple[str, str]]:
        report = one(path, scorer, settings(trainer_version=version))
        return {(found.code, found.severity) for found in report.findings}

    assert severities(None) == severities(3) == {("kld-high", "error")}
    # That the trainer holds them likelier than the engine did may be what it has learnt since.
    assert severities(5) == {("kld-high", "warning")}


def test_an_unusable_file_does_not_keep_others_from_being_judged(
    data_dir: Path, scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    paths = [tmp_path / "none.json", stored(tmp_path, samples), data_dir / "rollouts" / "fp32_raw__t1.json"]
    report = audit(paths, scorer, settings(statement=mode("raw")))
    assert [file.verdict for file in report.files] == ["unusable", "sound", "sound"]
    assert report.exit_code == 2
    assert report.num_samples == 64


def test_progress_runs_to_the_end(
    data_dir: Path, scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    paths = [stored(tmp_path, samples), data_dir / "rollouts" / "fp32_raw__t1.json"]
    told: list[float] = []
    options = settings(statement=mode("raw"), max_tokens=64)
    audit(paths, scorer, options, on_progress=told.append)
    assert told == sorted(told)
    assert len(told) > 4
    assert told[-1] == 1.0


# -- the model ---------------------------------------------------------------------------------------------


def test_another_model_than_the_one_stored_is_unusable(
    scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    path = stored(tmp_path, samples)
    for change, name in (
        ({"tokenizer_fingerprint": "other"}, "tokenizer_fingerprint"),
        ({"tokenizer_fingerprint": None}, "tokenizer_fingerprint"),
        ({"vocab_size": 1535}, "a vocabulary of at least 1536"),
    ):
        other = replace(scorer, identity=replace(scorer.identity, **change))  # type: ignore[arg-type]
        report = one(path, other)
        assert (report.verdict, codes(report.findings)) == ("unusable", {"model-mismatch"})
        assert report.findings[0].expected.startswith(name)


def test_a_head_may_have_more_rows_than_the_stored_vocabulary(
    scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    padded = replace(scorer, identity=replace(scorer.identity, vocab_size=1600))
    assert one(stored(tmp_path, samples), padded).verdict == "sound"


def test_provenance_that_names_no_model_is_compared_with_any(data_dir: Path, scorer: Scorer) -> None:
    other = replace(scorer, identity=replace(scorer.identity, tokenizer_fingerprint=None))
    path = data_dir / "rollouts" / "fp32_raw__t1.json"
    assert one(path, other, settings(statement=mode("raw"))).verdict == "sound"


def test_ids_beyond_a_smaller_models_vocabulary_are_findings(data_dir: Path, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=600,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    small = load_scorer(tmp_path / "small", device="cpu", dtype=torch.float32)
    path = data_dir / "rollouts" / "fp32_raw__t1.json"
    beyond = {
        at
        for at, row in enumerate(json.loads(path.read_text())["rows"])
        if max(row["prompt_ids"] + row["ids"]) >= 600
    }
    report = one(path, small, settings(statement=mode("raw")))
    found = {each.where.sample for each in report.findings if each.code == "token-out-of-range"}
    assert report.verdict == "findings"
    assert found == beyond != set()


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "cuda"])
def test_a_device_that_is_not_there_is_named(tinylm_dir: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ScoringError, match=device) as caught:
        load_scorer(tinylm_dir, device=device, dtype=torch.float32)
    assert caught.value.code == "device-missing"


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(StorageError, match=str(path)):
            load_scorer(path, device="cpu", dtype=torch.float32)


def test_the_audit_on_each_device_agrees(
    device: torch.device, tinylm_dir: Path, tmp_path: Path, samples: list[Sample]
) -> None:
    there = load_scorer(tinylm_dir, device=str(device), dtype=torch.float32)
    report = one(stored(tmp_path, samples), there)
    assert report.verdict == "sound"
    assert report.figures.max_abs_log_ratio < 1e-4


# -- what the model knows and the files do not say ---------------------------------------------------------


def without_last(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the four fields that a recording must have, without its last id and logprob."""
    return {**plain(row), "ids": row["ids"][:-1], "lp": row["lp"][:-1]}


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("prompt_ids", "ids", "lp", "finish_reason")}


def rewritten(
    data_dir: Path, tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], **sampling: object
) -> Path:
    """The 32 rollouts of the plain softmax, each row changed."""
    rows = json.loads((data_dir / "rollouts" / "fp32_processed__t1.json").read_text())["rows"]
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({"sampling": sampling, "rows": [change(row) for row in rows]}))
    return path


def test_stop_tokens_that_recorded_rows_lost_are_missed(
    data_dir: Path, scorer: Scorer, tmp_path: Path
) -> None:
    whole = rewritten(data_dir, tmp_path, plain)
    assert one(whole, scorer, settings(statement=mode("processed"))).findings == ()
    report = one(rewritten(data_dir, tmp_path, without_last), scorer, settings(statement=mode("processed")))
    # The manifest says of all 32 that they stopped, and each ends with 2 or 4, as generation_config.json has.
    assert report.verdict == "findings"
    assert [(found.code, found.severity) for found in report.findings] == [("finish-mismatch", "error")] * 32
    assert {found.where.sample for found in report.findings} == set(range(32))
    assert report.findings[0].expected.endswith("stop token 2 or 4")


@pytest.mark.parametrize("sampling", [{"stop": ["."]}, {"stop_token_ids": [30]}])
def test_rows_that_do_not_say_which_of_several_stops_ended_them_are_not_blamed(
    data_dir: Path, scorer: Scorer, tmp_path: Path, sampling: dict[str, object]
) -> None:
    path = rewritten(data_dir, tmp_path, without_last, **sampling)
    assert one(path, scorer, settings(statement=mode("processed"))).findings == ()
    # A null is an answer: no stop string and no other stop id ended the row.
    path = rewritten(data_dir, tmp_path, lambda row: {**without_last(row), "stop_reason": None}, **sampling)
    report = one(path, scorer, settings(statement=mode("processed")))
    assert codes(report.findings) == {"finish-mismatch"}
    assert len(report.findings) == 32
    path = rewritten(data_dir, tmp_path, lambda row: {**without_last(row), "stop_reason": "."}, **sampling)
    assert one(path, scorer, settings(statement=mode("processed"))).findings == ()


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (lambda ids: [1, *ids], "bos-doubled"),
        (lambda ids: ids[1:], "bos-missing"),
    ],
)
def test_a_wrong_start_of_recorded_prompts_is_named(
    data_dir: Path, scorer: Scorer, tmp_path: Path, prompt: Callable[[list[int]], list[int]], code: str
) -> None:
    path = rewritten(data_dir, tmp_path, lambda row: {**plain(row), "prompt_ids": prompt(row["prompt_ids"])})
    report = one(path, scorer, settings(statement=mode("processed")))
    assert report.verdict == "findings"
    assert [found.code for found in report.findings] == [code] * 32


def test_shards_that_do_not_say_bos_and_eos_are_checked_with_those_of_the_model(
    scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    def silent(sample: Sample, **stated: object) -> Sample:
        changed: dict[str, Any] = {"bos_token_id": None, "eos_token_ids": (), **stated}
        return replace(sample, provenances=tuple(replace(each, **changed) for each in sample.provenances))

    rng = np.random.default_rng(0)
    (doubled,) = FAULTS["bos-doubled"].plant([samples[3]], rng)
    (lost,) = FAULTS["finish-mismatch"].plant([samples[5]], rng)
    path = stored(tmp_path, [silent(samples[0]), silent(doubled), silent(lost)])
    report = one(path, scorer)
    assert [(found.code, found.where.sample) for found in report.findings] == [
        ("bos-doubled", 1),
        ("finish-mismatch", 2),
    ]
    # What is stated is not overridden: these say that id 7 begins a prompt, or that another model sampled.
    (tmp_path / "stated").mkdir()
    report = one(stored(tmp_path / "stated", [silent(doubled, bos_token_id=7)]), scorer)
    assert codes(report.findings) == {"bos-missing"}
    (tmp_path / "other").mkdir()
    report = one(stored(tmp_path / "other", [silent(doubled, tokenizer_fingerprint="other")]), scorer)
    assert codes(report.findings) == {"model-mismatch"}


# -- files -------------------------------------------------------------------------------------------------


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _altered(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(bytes(data))


def _newer(path: Path) -> None:
    data = path.read_bytes()
    assert data.count(b"rlbatch.samples") == 1
    path.write_bytes(data.replace(b"rlbatch.samples", b"rlbatch.samplez"))


def _no_header(path: Path) -> None:
    path.write_bytes(b"not a shard")


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (_truncated, {"shard-truncated"}),
        (_altered, {"shard-altered"}),
        (_newer, {"schema-unknown"}),
        (_no_header, {"file-unusable", "shard-truncated"}),
    ],
)
def test_a_harmed_shard_is_unusable_and_says_how(
    scorer: Scorer, tmp_path: Path, samples: list[Sample], harm: Callable[[Path], None], expected: set[str]
) -> None:
    path = stored(tmp_path, samples)
    harm(path)
    report = one(path, scorer)
    assert report.verdict == "unusable"
    assert codes(report.findings) <= expected
    assert report.findings[0].where.path == str(path)
    assert report.num_samples == report.figures.num_tokens == 0


def test_an_empty_directory_is_unusable(scorer: Scorer, tmp_path: Path) -> None:
    report = one(tmp_path, scorer)
    assert (report.verdict, codes(report.findings)) == ("unusable", {"file-unusable"})


def test_every_shard_of_a_directory_is_a_file_of_the_report(
    scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    for at in range(2):
        write_shard(tmp_path / f"{at:06d}.safetensors", samples)
    _truncated(tmp_path / "000001.safetensors")
    report = audit([tmp_path], scorer, settings())
    assert [(Path(file.path).name, file.verdict) for file in report.files] == [
        ("000000.safetensors", "sound"),
        ("000001.safetensors", "unusable"),
    ]


def test_a_store_with_a_shard_missing_is_unusable(
    scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    with open_writer(tmp_path, max_samples=8) as writer:
        for each in samples:
            writer.append(each)
    (tmp_path / "000001.safetensors").unlink()
    report = one(tmp_path, scorer)
    assert (report.verdict, codes(report.findings)) == ("unusable", {"store-changed"})


def test_a_flag_that_denies_a_shards_provenance_is_unusable(
    scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    path = stored(tmp_path, samples)
    assert one(path, scorer, settings(statement=Statement(logprobs_mode="raw"))).verdict == "sound"
    report = one(path, scorer, settings(statement=Statement(logprobs_mode="processed")))
    assert (report.verdict, codes(report.findings)) == ("unusable", {"statement-contradicted"})


def test_samples_of_several_modes_in_one_file_are_judged_apart(
    data_dir: Path, scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    path = data_dir / "rollouts" / "fp32_processed__t07.json"
    rows = read_recording(path, mode("processed"), identity=scorer.identity)
    mixed = [
        sample
        for raw, row in zip(samples, rows, strict=True)
        for sample in (raw, row.sample)
        if sample is not None
    ]
    report = one(stored(tmp_path, mixed), scorer)
    assert report.verdict == "sound"
    assert report.figures.num_tokens == 604 + 569


@pytest.mark.parametrize("trainer_version", [None, 5])
def test_rows_with_each_others_logprobs_are_named_whatever_their_age(
    scorer: Scorer, tmp_path: Path, samples: list[Sample], trainer_version: int | None
) -> None:
    strangers = []
    for sample, other in zip(samples, samples[1:] + samples[:1], strict=True):
        values = other.inference_logprobs[other.loss_mask]
        logprobs = sample.inference_logprobs.copy()
        logprobs[sample.loss_mask] = np.resize(values, int(sample.loss_mask.sum()))
        strangers.append(replace(sample, inference_logprobs=logprobs))
    report = one(stored(tmp_path, strangers), scorer, settings(trainer_version=trainer_version))
    assert report.verdict == "findings"
    named = [found for found in report.findings if found.severity == "error"]
    lengths = [int(sample.loss_mask.sum()) for sample in samples]
    # A list that is repeated until it fills a longer row is no row's: it may stay unexplained.
    whole = {row for row, length in enumerate(lengths) if lengths[(row + 1) % len(lengths)] >= length}
    assert codes(tuple(found for found in named if found.where.sample in whole)) == {"rows-permuted"}
    assert codes(tuple(named)) <= {"rows-permuted", "unexplained"}
    # Row 0 carries what row 1 should.
    assert named[0].where.sample == 0
    assert "those of sample 1," in named[0].found


def test_drift_within_the_limits_of_no_age_is_not_called_sound(
    scorer: Scorer, tmp_path: Path, samples: list[Sample]
) -> None:
    """Two versions, neither with enough tokens for a limit, both off by more than a limit allows."""
    offset = np.float32(0.44)
    versions = [np.where(s.loss_mask, i % 2, -1).astype(np.int32) for i, s in enumerate(samples * 2)]
    drifted = [
        replace(s, inference_logprobs=s.inference_logprobs - offset, policy_version=version)
        for s, version in zip(samples * 2, versions, strict=True)
    ]
    report = one(stored(tmp_path, drifted), scorer, settings(trainer_version=1))
    assert report.verdict == "not-judged"


def test_a_lost_stop_token_is_told_once_and_the_rest_of_the_row_is_compared(
    data_dir: Path, scorer: Scorer, tmp_path: Path
) -> None:
    document = json.loads((data_dir / "rollouts" / "fp32_raw__t1.json").read_text())
    at, row = next((at, row) for at, row in enumerate(document["rows"]) if row["stop_reason"] == 4)
    whole = sum(len(each["ids"]) for each in document["rows"])
    row["ids"].pop()
    row["lp"].pop()
    path = tmp_path / "lost.json"
    path.write_text(json.dumps(document))
    report = one(path, scorer, settings(statement=mode("raw")))
    (found,) = report.findings
    assert (found.code, found.severity, found.where.sample) == ("finish-mismatch", "error", at)
    assert found.expected == "a turn that ended with `stop` to end with stop token 4"
    assert report.figures.num_tokens == whole - 1
