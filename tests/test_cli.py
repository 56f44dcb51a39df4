"""The commands: exit codes, and what goes to stdout and what to stderr."""

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from rlbatch.catalogue import CATALOGUE
from rlbatch.cli import app
from rlbatch.cli.demo import judge, load
from rlbatch.cli.explain import FOUND
from rlbatch.cli.options import HELP
from rlbatch.faults import FAULTS
from rlbatch.storage import open_reader
from rlbatch.storage.statements import Statement

RAW = ("--engine", "vllm", "--logprobs-mode", "raw")
PROCESSED = ("--engine", "vllm", "--logprobs-mode", "processed")
# An engine whose rule for kept sets is not known: what it truncated cannot be compared.
ELSEWHERE = ("--engine", "sglang", "--logprobs-mode", "processed")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The model is too small to share out: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rollouts(data_dir: Path) -> Path:
    return data_dir / "rollouts"


def rlbatch(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


# -- audit -------------------------------------------------------------------------------------------------


def test_the_shipped_rollouts_and_model_are_sound(tinylm_dir: Path) -> None:
    result = rlbatch("audit", tinylm_dir.parent / "rollouts", "--model", tinylm_dir)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("sound: ")
    assert result.stdout.count(".safetensors") == 4
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("name", "flags", "exit_code"),
    [
        ("fp32_raw__t1.json", RAW, 0),
        ("fp32_processed__t07.json", (*PROCESSED, "--temperature", "0.7"), 0),
        ("fp32_rawlogits__t1.json", RAW, 1),
        ("fp32_raw__t1.json", (), 2),
        ("fp32_raw__t1.json", (*RAW, "--temperature", "0.7"), 2),
        ("fp32_processed__t1_topp08.json", PROCESSED, 0),
        ("fp32_processed__t1_topk20.json", PROCESSED, 0),
        ("fp32_processed__t1_topp08.json", ELSEWHERE, 3),
    ],
)
def test_the_exit_code_is_in_the_json_too_and_stdout_has_nothing_else(
    rollouts: Path, tinylm_dir: Path, name: str, flags: tuple[str, ...], exit_code: int
) -> None:
    result = rlbatch("audit", rollouts / name, "--model", tinylm_dir, "--format", "json", *flags)
    document = json.loads(result.stdout)
    verdict = {0: "sound", 1: "findings", 2: "unusable", 3: "not-judged"}[exit_code]
    assert result.exit_code == document["exit_code"] == exit_code
    assert document["verdict"] == document["files"][0]["verdict"] == verdict
    assert document["files"][0]["path"] == str(rollouts / name)
    assert bool(document["findings"]) is (exit_code != 0)


def test_several_files_end_with_the_worst_of_them(rollouts: Path, tinylm_dir: Path) -> None:
    sound, logits = rollouts / "fp32_raw__t1.json", rollouts / "fp32_rawlogits__t1.json"
    for paths, exit_code in (
        ((sound, logits), 1),
        ((sound, logits, rollouts / "none.json"), 2),
        ((sound, rollouts / "fp32_raw__t07.json"), 0),
    ):
        assert rlbatch("audit", *paths, "--model", tinylm_dir, *RAW).exit_code == exit_code


def test_where_nothing_was_judged_the_word_sound_is_not_printed(rollouts: Path, tinylm_dir: Path) -> None:
    paths = [rollouts / "fp32_processed__t1_topp08.json", rollouts / "fp32_processed__t1.json"]
    result = rlbatch("audit", *paths, "--model", tinylm_dir, *ELSEWHERE)
    assert result.exit_code == 3
    assert "sound" not in result.output.lower()
    assert "[incomparable]" in result.stdout


def test_findings_are_printed_as_the_errors_text(rollouts: Path, tinylm_dir: Path) -> None:
    result = rlbatch("audit", rollouts / "fp32_rawlogits__t1.json", "--model", tinylm_dir, *RAW)
    assert "[logprob-positive]" in result.stdout
    assert "  fix:      " + CATALOGUE["logprob-positive"].fix in result.stdout
    assert "28 more of 32 findings (28 logprob-positive)" in result.stdout


def test_missing_flags_are_named(rollouts: Path, tinylm_dir: Path) -> None:
    result = rlbatch("audit", rollouts / "fp32_raw__t1.json", "--model", tinylm_dir, "--engine", "vllm")
    assert result.exit_code == 2
    assert "[provenance-missing]" in result.stdout
    assert "state what was in force with --logprobs-mode" in result.stdout


def test_a_negated_flag_states_too(data_dir: Path, tinylm_dir: Path) -> None:
    path = data_dir / "replies" / "fp32_processed" / "completions_ids_lp1_t1_logitbias.json"
    neutral = ("--top-p", "1", "--top-k", "-1", "--min-p", "0", "--repetition-penalty", "1")
    stated = rlbatch("audit", path, "--model", tinylm_dir, *PROCESSED, *neutral)
    denied = rlbatch("audit", path, "--model", tinylm_dir, *PROCESSED, *neutral, "--no-logit-bias")
    assert stated.exit_code == 3
    assert denied.exit_code == 2
    assert "[statement-contradicted]" in denied.stdout


def test_with_json_an_unusable_file_is_on_stderr_for_people(tmp_path: Path, tinylm_dir: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("{oops\n")
    result = rlbatch("audit", path, "--model", tinylm_dir, "--format", "json", *RAW)
    assert result.exit_code == 2
    assert json.loads(result.stdout)["findings"][0]["code"] == "file-unusable"
    assert "line 1: " in result.stderr


@pytest.fixture
def with_a_refusal(data_dir: Path, tmp_path: Path) -> Path:
    """Two replies of other temperatures, and between them a request that was refused."""
    directory = data_dir / "replies" / "fp32_processed"
    first, last = (
        json.loads((directory / f"completions_ids_lp1_{name}.json").read_text()) for name in ("t07", "t13")
    )
    refused = {**first, "status": 503, "response": {"error": {"message": "busy"}}}
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in (first, refused, last)))
    return path


NEUTRAL = ("--top-p", "1", "--top-k", "0", "--min-p", "0", "--repetition-penalty", "1")


def test_a_refused_request_is_left_out_of_an_audit_on_request_only(
    with_a_refusal: Path, tinylm_dir: Path
) -> None:
    arguments = ("audit", with_a_refusal, "--model", tinylm_dir, *PROCESSED, *NEUTRAL)
    result = rlbatch(*arguments)
    assert result.exit_code == 2
    assert "line 2: status 503" in result.stdout
    assert "--skip-refused" in result.stdout
    result = rlbatch(*arguments, "--skip-refused")
    assert result.exit_code == 0
    assert "line 2: status 503" in result.stdout
    assert result.stdout.splitlines()[-2:] == [
        "1 recorded requests that the engine refused are left out",
        "sound: every token that was compared lines up",
    ]
    document = json.loads(rlbatch(*arguments, "--skip-refused", "--format", "json").stdout)
    assert document["total"]["num_samples"] == 2
    assert [found["code"] for found in document["findings"]] == ["reply-error-body"]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_model_that_is_not_there_is_an_error_on_stderr(
    rollouts: Path, tmp_path: Path, as_json: bool
) -> None:
    flags = ("--format", "json") if as_json else ()
    result = rlbatch("audit", rollouts / "fp32_raw__t1.json", "--model", tmp_path / "none", *RAW, *flags)
    assert result.exit_code == 2
    assert result.stderr.startswith("StorageError: [file-unusable]")
    if as_json:
        assert json.loads(result.stdout)["verdict"] == "unusable"
    else:
        assert result.stdout == ""


def test_a_device_that_is_not_there_is_an_error(rollouts: Path, tinylm_dir: Path) -> None:
    result = rlbatch(
        "audit", rollouts / "fp32_raw__t1.json", "--model", tinylm_dir, *RAW, "--device", "cuda:99"
    )
    assert result.exit_code == 2
    assert "[device-missing]" in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--logprobs-mode", "both"),
        ("--engine", "vlm"),
        ("--format", "yaml"),
        ("--dtype", "int8"),
        ("--max-tokens", "0"),
        ("--trainer-version", "-1"),
        ("--temprature", "1"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(rollouts: Path, tinylm_dir: Path, flags: tuple[str, ...]) -> None:
    result = rlbatch("audit", rollouts / "fp32_raw__t1.json", "--model", tinylm_dir, *flags)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert flags[0] in result.stderr


def test_another_tokenizer_than_the_one_stored_is_unusable(tinylm_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(tinylm_dir, other)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    shard = tinylm_dir.parent / "rollouts" / "000000.safetensors"
    assert rlbatch("audit", shard, "--model", tinylm_dir).exit_code == 0
    result = rlbatch("audit", shard, "--model", other)
    assert result.exit_code == 2
    assert "[model-mismatch]" in result.stdout


def test_a_lower_precision_is_close_and_still_sound(rollouts: Path, tinylm_dir: Path) -> None:
    result = rlbatch(
        "audit",
        rollouts / "fp32_raw__t1.json",
        *("--model", tinylm_dir, *RAW, "--dtype", "bfloat16", "--format", "json"),
    )
    assert result.exit_code == 0
    # Measured with a bf16 trainer on these rows: 0.055 nats at most.
    assert 1e-3 < json.loads(result.stdout)["total"]["max_abs_log_ratio"] < 0.25


def test_the_program_itself_prints_one_document_and_no_traceback(rollouts: Path, tinylm_dir: Path) -> None:
    program = Path(sys.executable).parent / "rlbatch"
    arguments = [rollouts / "fp32_raw__t1.json", "--model", tinylm_dir, "--format", "json"]
    done = subprocess.run(
        [program, "audit", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == json.loads(done.stdout)["exit_code"] == 2
    assert "Traceback" not in done.stderr
    assert "[provenance-missing]" in done.stderr


# -- convert -----------------------------------------------------------------------------------------------


def test_converted_rollouts_are_audited_without_flags(
    rollouts: Path, tinylm_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "shards"
    paths = [rollouts / "fp32_processed__t07.json", rollouts / "fp32_processed__t13.json"]
    result = rlbatch("convert", *paths, "--out", out, "--model", tinylm_dir, *PROCESSED)
    assert result.exit_code == 0
    reader = open_reader(out)
    rows = [row for path in paths for row in json.loads(path.read_text())["rows"]]
    tokens = sum(len(row["prompt_ids"]) + len(row["ids"]) for row in rows)
    assert result.stdout == f"{out}: 1 shards, 64 samples, {tokens:,} tokens\n"
    assert [sample.token_ids.tolist() for sample in reader] == [
        row["prompt_ids"] + row["ids"] for row in rows
    ]
    assert len({sample.trajectory_id for sample in reader}) == 64
    # From the model directory: sha256 of tokenizer.json, config.json and generation_config.json.
    assert {(said.vocab_size, said.eos_token_ids) for said in reader.provenances} == {(1536, (2, 4))}
    # Tokenizer and chat template both begin with <|bos|>, id 1.
    assert {said.bos_token_id for said in reader.provenances} == {1}
    assert {said.tokenizer_fingerprint for said in reader.provenances} == {
        "9a08c7f6910288fc0b1ef075a3118ea431d0e8d6d51f9cd9b23083105c160931"
    }
    assert rlbatch("audit", out, "--model", tinylm_dir).exit_code == 0


@pytest.mark.parametrize(
    ("bad", "code"), [("fp32_rawlogits__t1.json", "logprob-positive"), ("none.json", "file-unusable")]
)
def test_nothing_is_written_where_any_input_has_a_fault(
    rollouts: Path, tmp_path: Path, bad: str, code: str
) -> None:
    out = tmp_path / "shards"
    result = rlbatch("convert", rollouts / "fp32_raw__t1.json", rollouts / bad, "--out", out, *RAW)
    assert result.exit_code == 2
    assert f"[{code}]" in result.stderr
    assert result.stdout == ""
    assert not out.exists()


def test_a_row_that_became_no_sample_keeps_all_from_being_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"sampling": {}, "rows": [{"prompt_ids": [1], "ids": [5, 2], "lp": [-1.0]}]}')
    result = rlbatch("convert", path, "--out", tmp_path / "shards", *RAW)
    assert result.exit_code == 2
    assert result.stderr.startswith("SoundnessError: [length-mismatch]")
    assert not (tmp_path / "shards").exists()


def test_refused_requests_are_counted_where_the_rest_is_converted(
    with_a_refusal: Path, tmp_path: Path
) -> None:
    arguments = ("convert", with_a_refusal, "--out", tmp_path / "shards", *PROCESSED, *NEUTRAL)
    assert rlbatch(*arguments).exit_code == 2
    assert not (tmp_path / "shards").exists()
    result = rlbatch(*arguments, "--skip-refused")
    assert (result.exit_code, result.stderr) == (0, "warnings: 1 reply-error-body\n")
    names = [sample.trajectory_id for sample in open_reader(tmp_path / "shards")]
    assert names == ["log:1#0", "log:3#0"]


def test_what_cannot_be_compared_is_converted_with_a_warning(rollouts: Path, tmp_path: Path) -> None:
    path = rollouts / "fp32_processed__t1_topp08.json"
    result = rlbatch("convert", path, "--out", tmp_path / "shards", *ELSEWHERE)
    assert result.exit_code == 0
    assert result.stderr == "warnings: 32 incomparable\n"
    assert len(open_reader(tmp_path / "shards")) == 32


def test_what_a_turn_and_its_sample_both_show_is_told_once(tinylm_dir: Path, tmp_path: Path) -> None:
    row = {
        "prompt_ids": [1, 9],
        "ids": [5, 7],
        "lp": [-1.0, -2.0],
        "finish_reason": "stop",
        "stop_reason": None,
    }
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"sampling": {}, "rows": [row]}))
    result = rlbatch("convert", path, "--out", tmp_path / "shards", "--model", tinylm_dir, *RAW)
    assert result.exit_code == 2
    assert result.stderr.count("[finish-mismatch]") == 1


def test_shards_are_never_added_to(rollouts: Path, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    arguments = ("convert", rollouts / "fp32_raw__t1.json", "--out", out, *RAW)
    assert rlbatch(*arguments).exit_code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    result = rlbatch(*arguments)
    assert result.exit_code == 2
    assert "[file-unusable]" in result.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_recordings_of_one_name_would_share_ids_and_are_refused(rollouts: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [rollouts / "fp32_raw__t1.json", tmp_path / "other" / "fp32_raw__t1.json"]
    shutil.copy(*paths)
    result = rlbatch("convert", *paths, "--out", tmp_path / "shards", *RAW)
    assert result.exit_code == 2
    assert "trajectories are named after them" in result.stderr


def test_what_rows_say_of_their_rollouts_is_stored(tmp_path: Path) -> None:
    said = {"trajectory_id": "q7/0", "group_id": "q7", "reward": 1.0, "advantage": 0.5, "policy_version": 3}
    row = {"prompt_ids": [1, 9], "ids": [5, 2], "lp": [-1.0, -2.0], **said}
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"sampling": {}, "rows": [row]}))
    assert rlbatch("convert", path, "--out", tmp_path / "shards", *RAW).exit_code == 0
    (sample,) = open_reader(tmp_path / "shards")
    assert (sample.trajectory_id, sample.group_id, sample.reward) == ("q7/0", "q7", 1.0)
    assert sample.advantages.tolist() == [0.0, 0.0, 0.5, 0.5]
    assert sample.policy_version.tolist() == [-1, -1, 3, 3]


@pytest.mark.parametrize("second", ["a", "b"])
def test_rows_that_name_themselves_alike_are_refused_in_one_file_and_in_two(
    tmp_path: Path, second: str
) -> None:
    row = {"prompt_ids": [1, 9], "ids": [5, 2], "lp": [-1.0, -2.0], "trajectory_id": "q7/0"}
    rows = {"a": [row, {**row, "ids": [6, 2]}]} if second == "a" else {"a": [row], "b": [row]}
    for name, each in rows.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"sampling": {}, "rows": each}))
    paths = [tmp_path / f"{name}.json" for name in rows]
    result = rlbatch("convert", *paths, "--out", tmp_path / "shards", *RAW)
    assert result.exit_code == 2
    place = f"{paths[-1]} sample {1 if second == 'a' else 0}, trajectory 'q7/0'"
    assert result.stderr.startswith(f"SoundnessError: [duplicate-sample] {place}")
    assert f"first at {paths[0]} sample 0" in result.stderr
    assert not (tmp_path / "shards").exists()


def test_shards_can_be_converted_again(tinylm_dir: Path, tmp_path: Path) -> None:
    source = tinylm_dir.parent / "rollouts"
    assert rlbatch("convert", source, "--out", tmp_path / "one").exit_code == 0
    assert len(open_reader(tmp_path / "one")) == len(open_reader(source)) == 102


# -- explain, demo, help -----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", list(CATALOGUE))
def test_every_code_is_explained_in_full(code: str) -> None:
    result = rlbatch("explain", code)
    entry = CATALOGUE[code]
    assert result.exit_code == 0
    for text in (entry.code, FOUND[entry.level], entry.symptom, entry.check, entry.likely, entry.fix):
        assert text in result.stdout


def test_without_a_code_all_are_listed() -> None:
    result = rlbatch("explain")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ")] == list(
        CATALOGUE
    )


def test_an_unknown_code_gives_near_ones() -> None:
    result = rlbatch("explain", "shfited")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "near: shifted" in result.stderr
    assert "lists all codes" in rlbatch("explain", "zzzz").stderr


def test_the_demonstration_names_every_fault_and_none_in_good_data() -> None:
    result = rlbatch("demo")
    assert result.exit_code == 0
    paragraphs = result.stdout.split("\n\n")
    assert paragraphs[0] == "32 rollouts of a real vLLM server, 1746 sampled tokens: sound, nothing to say"
    # The model's own logprobs are stored: what changes ids or temperature takes the model itself.
    codes = [code for code, fault in FAULTS.items() if not fault.rescored]
    # The first is the good data's, the last two say what was seen, and nothing.
    assert len(paragraphs) == 1 + len(codes) + 2
    assert paragraphs[-2].startswith(f"{len(codes)} of {len(codes)} faults named. ")
    assert paragraphs[-1] == ""
    for code, paragraph in zip(codes, paragraphs[1:], strict=False):
        assert paragraph.startswith(f"planted: {code}. ")
        assert f"\n[{code}]" in paragraph


def test_the_demonstrations_data_are_the_recorded_rows_with_their_trainers_logprobs(rollouts: Path) -> None:
    samples = load()
    short, long = (
        json.loads((rollouts / f"fp32_raw__{name}.json").read_text())["rows"] for name in ("t1", "long400")
    )
    for sample, row in zip(samples, short[:29] + long[:3], strict=True):
        assert sample.token_ids.tolist() == row["prompt_ids"] + row["ids"]
        assert sample.proximal_logprobs is not None
        trainer = sample.proximal_logprobs[len(row["prompt_ids"]) :]
        # Measured on these rows, engine against transformers in float32: 1.9e-5 nats at most.
        assert max(abs(trainer - row["lp"])) < 1e-4
    assert judge(samples) == ()


def test_the_version_is_that_of_the_package() -> None:
    result = rlbatch("--version")
    assert (result.exit_code, result.stdout) == (0, f"rlbatch {metadata.version('rlbatch')}\n")


def test_help_lists_every_flag_in_full_and_each_field_has_one() -> None:
    assert list(HELP) == [spec.name for spec in fields(Statement)]
    for command in ("audit", "convert"):
        text = rlbatch(command, "--help").stdout
        for name in HELP:
            assert "--" + name.replace("_", "-") in text


@pytest.mark.parametrize("arguments", ["['--help']", "['audit', '--help']", "['explain', 'shifted']"])
def test_help_and_explain_import_neither_torch_nor_transformers(arguments: str) -> None:
    done = python(
        "import sys\n"
        "from rlbatch.cli import app\n"
        "try:\n"
        f"    app({arguments})\n"
        "except SystemExit as end:\n"
        "    code = end.code\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules], code)\n"
    )
    assert done.stdout.splitlines()[-1] == "[] 0", done.stderr


def test_an_error_of_the_program_itself_does_not_end_like_findings() -> None:
    # Without a standard output it cannot answer, which no command expects.
    done = python(
        "import sys\n"
        "from rlbatch.cli import main\n"
        "sys.argv = ['rlbatch', 'explain']\n"
        "sys.stdout.close()\n"
        "main()\n"
    )
    assert done.returncode == 2
    assert "Traceback" in done.stderr


BAR = (
    "import sys, time\n"
    "from rlbatch.cli.progress import LateProgress\n"
    "with LateProgress('auditing', delay=float(sys.argv[1])) as progress:\n"
    "    progress(0.25)\n"
    "    time.sleep(0.4)\n"
)


def _stderr_of_a_terminal(delay: str) -> bytes:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(
        [sys.executable, "-c", BAR, delay],
        stderr=theirs,
        stdout=subprocess.PIPE,
        env=environment,
        check=True,
    )
    os.close(theirs)
    assert done.stdout == b""
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:
        # A terminal whose other side is closed ends like this.
        pass
    os.close(ours)
    return shown


def test_progress_shows_on_a_terminal_once_it_takes_long() -> None:
    assert b"auditing" in _stderr_of_a_terminal("0.05")
    assert _stderr_of_a_terminal("30") == b""


def test_progress_never_shows_where_stderr_is_no_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", BAR, "0.0"], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
