"""Recorded JSON as samples, against the files themselves as Python's own `json` reads them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlbatch.engines.request import contradictions
from rlbatch.errors import ReplyError, RlbatchError, StorageError, Where
from rlbatch.records import LogprobsMode, Provenance
from rlbatch.storage.documents import MAX_DOCUMENT_BYTES
from rlbatch.storage.recorded_sampling import SAMPLING_FIELDS, sampling_of_request
from rlbatch.storage.recordings import Row, read_recording
from rlbatch.storage.sources import files_of, read_rows
from rlbatch.storage.statements import (
    ModelIdentity,
    Statement,
    provenance_of,
    require_agreement,
)

RAW = Statement(engine="vllm", logprobs_mode="raw")
PROCESSED = Statement(engine="vllm", logprobs_mode="processed")
FULL = Statement(
    engine="vllm",
    logprobs_mode="raw",
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
)
FULL_COLD = replace(FULL, temperature=None)
"""Of a request that says its temperature."""
TWO_ROWS = {
    "sampling": {},
    "rows": [
        {"prompt_ids": [1, 9], "ids": [5, 2], "lp": [-1.5, -0.25], "finish_reason": "stop"},
        {"prompt_ids": [1, 8], "ids": [7], "lp": [-0.5], "finish_reason": "length"},
    ],
}


def write(path: Path, *documents: object) -> Path:
    path.write_text("\n".join(json.dumps(document) for document in documents))
    return path


def only_row(path: Path, statement: Statement) -> Row:
    (row,) = read_recording(path, statement)
    return row


def provenance(path: Path, statement: Statement) -> Provenance:
    row = next(iter(read_recording(path, statement)))
    assert row.sample is not None
    return row.sample.provenances[0]


@pytest.mark.parametrize("server", ["fp32_raw", "fp32_processed", "bf16_raw", "bf16_processed"])
def test_every_recorded_row_becomes_its_ids_and_logprobs_bit_for_bit(data_dir: Path, server: str) -> None:
    mode: LogprobsMode = "raw" if server.endswith("raw") else "processed"
    statement = Statement(engine="vllm", logprobs_mode=mode)
    files = sorted((data_dir / "rollouts").glob(f"{server}__*.json"))
    assert len(files) >= 4
    for file in files:
        document = json.loads(file.read_text())
        # Raw values of a tempered or truncated distribution are not those of the behaviour.
        plain = set(document["sampling"]) <= {"ignore_eos", "max_tokens"}
        rows = list(read_recording(file, statement))
        for row, recorded in zip(rows, document["rows"], strict=True):
            sample, prompt = row.sample, len(recorded["prompt_ids"])
            assert sample is not None
            assert sample.token_ids.tolist() == recorded["prompt_ids"] + recorded["ids"]
            assert sample.loss_mask.tolist() == [False] * prompt + [True] * len(recorded["ids"])
            behaviour = mode == "processed" or plain
            column = sample.inference_logprobs if behaviour else sample.raw_inference_logprobs
            assert column is not None
            np.testing.assert_array_equal(column[prompt:], np.array(recorded["lp"], np.float32))
            if not behaviour:
                assert np.isnan(sample.inference_logprobs).all()
            assert sample.finish_reasons == (recorded["finish_reason"],)
            said = sample.provenances[0].sampling
            assert said.temperature == document["sampling"].get("temperature", 1.0)
            assert said.top_p == document["sampling"].get("top_p", 1.0)
            assert said.top_k == document["sampling"].get("top_k", 0)
        assert [row.index for row in rows] == list(range(len(rows)))
        assert rows[-1].share == 1.0


def test_rows_of_one_prompt_are_a_group(tmp_path: Path) -> None:
    rows = [{"prompt_ids": ids, "ids": [5], "lp": [-1.0]} for ids in ([1, 9], [1, 8], [1, 9])]
    read = read_recording(write(tmp_path / "r.json", {"sampling": {}, "rows": rows}), RAW)
    groups = [row.sample.group_id for row in read if row.sample is not None]
    assert groups == ["r@0", "r@1", "r@0"]


@pytest.mark.parametrize(
    ("lp", "code"),
    [
        ([-1.5], "length-mismatch"),
        ([-1.5, None], "logprob-missing"),
        ([-1.5, -1e39], "logprob-not-finite"),
    ],
)
def test_a_faulty_row_is_a_finding_in_its_place_and_the_others_are_read(
    tmp_path: Path, lp: list[float | None], code: str
) -> None:
    document = {"sampling": {}, "rows": [{**TWO_ROWS["rows"][0], "lp": lp}, TWO_ROWS["rows"][1]]}  # type: ignore[index]
    path = write(tmp_path / "r.json", document)
    first, second = read_recording(path, RAW)
    assert first.sample is None
    assert [found.code for found in first.findings] == [code]
    assert first.findings[0].where == Where(path=str(path), sample=0, trajectory="r#0")
    assert second.index == 1
    assert second.sample is not None
    assert second.sample.token_ids.tolist() == [1, 8, 7]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"lp": None}, "logprobs-missing"),
        ({"ids": None}, "ids-missing"),
        ({"prompt_ids": None}, "prompt-ids-missing"),
        ({"prompt_ids": []}, "prompt-ids-missing"),
        ({"finish_reason": "exploded"}, "reply-malformed"),
    ],
)
def test_a_row_without_what_it_takes_makes_the_file_unusable(
    tmp_path: Path, change: dict[str, object], code: str
) -> None:
    document = {"sampling": {}, "rows": [TWO_ROWS["rows"][0], {**TWO_ROWS["rows"][1], **change}]}  # type: ignore[index]
    path = write(tmp_path / "r.json", document)
    with pytest.raises(ReplyError) as caught:
        list(read_recording(path, RAW))
    assert caught.value.code == code
    assert caught.value.findings[0].where.sample == 1
    assert caught.value.findings[0].where.path == str(path)


@pytest.mark.parametrize("change", [{"ids": [5, -2]}, {"ids": [5, 2**31]}, {"ids": [5, True]}, {"lp": ["x"]}])
def test_a_row_of_wrong_types_makes_the_file_unusable(tmp_path: Path, change: dict[str, object]) -> None:
    document = {"sampling": {}, "rows": [{**TWO_ROWS["rows"][0], **change}]}  # type: ignore[index]
    with pytest.raises(StorageError, match=r"\[file-unusable\]") as caught:
        list(read_recording(write(tmp_path / "r.json", document), RAW))
    assert "rows[0]" in caught.value.findings[0].found


def rows_with(tmp_path: Path, **said: object) -> Path:
    rows = [{**TWO_ROWS["rows"][0], **said}, TWO_ROWS["rows"][1]]  # type: ignore[index]
    return write(tmp_path / "r.json", {"sampling": {}, "rows": rows})


def test_what_a_row_says_of_its_rollout_is_carried(tmp_path: Path) -> None:
    said = {
        "trajectory_id": "q7/0",
        "group_id": "q7",
        "reward": 1,
        "advantage": -0.5,
        "policy_version": 3,
    }
    told, silent = read_recording(rows_with(tmp_path, **said), RAW)
    assert told.sample is not None
    assert (told.sample.trajectory_id, told.sample.group_id, told.sample.reward) == ("q7/0", "q7", 1.0)
    assert told.sample.advantages.tolist() == [0.0, 0.0, -0.5, -0.5]
    assert told.sample.policy_version.tolist() == [-1, -1, 3, 3]
    assert silent.sample is not None
    assert (silent.sample.trajectory_id, silent.sample.group_id) == ("r#1", "r@1")
    assert silent.sample.reward is None
    assert silent.sample.policy_version.tolist() == [-1, -1, -1]


def test_a_faulty_row_is_found_under_the_name_that_it_says(tmp_path: Path) -> None:
    first, _ = read_recording(rows_with(tmp_path, trajectory_id="q7/0", lp=[-1.5]), RAW)
    assert first.findings[0].where.trajectory == "q7/0"


@pytest.mark.parametrize("name", ["completion_ids", "advantages", "foo"])
def test_a_field_of_a_row_that_cannot_be_carried_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError) as caught:
        list(read_recording(rows_with(tmp_path, **{name: [1]}), RAW))
    (found,) = caught.value.findings
    assert found.code == "file-unusable"
    assert found.found == f"Object contains unknown field `{name}` - at `$.rows[0]`"
    assert "prompt_ids, ids, lp" in found.fix


def test_a_field_that_cannot_be_carried_is_refused_beside_numbers_that_are_not_finite(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="unknown field `foo`"):
        list(read_recording(rows_with(tmp_path, lp=[float("nan"), -1.0], foo=1), RAW))


@pytest.mark.parametrize("version", [-1, 2**31, "3"])
def test_a_row_of_a_version_that_is_none_makes_the_file_unusable(tmp_path: Path, version: object) -> None:
    with pytest.raises(StorageError, match="policy_version"):
        list(read_recording(rows_with(tmp_path, policy_version=version), RAW))


def test_a_row_with_an_advantage_beyond_float32_makes_the_file_unusable(tmp_path: Path) -> None:
    with pytest.raises(ReplyError, match=r"Trajectory\.advantage: expected a number that float32 holds"):
        list(read_recording(rows_with(tmp_path, advantage=1e39), RAW))


@pytest.mark.parametrize("said", [{"stop_reason": None}, {}])
def test_tokens_behind_a_stop_token_are_told_of_the_turn_only_where_the_row_says_its_end(
    tmp_path: Path, said: dict[str, object]
) -> None:
    row = {"prompt_ids": [1, 9], "ids": [5, 2, 0, 0], "lp": [-1.0] * 4, "finish_reason": "stop", **said}
    path = write(tmp_path / "r.json", {"sampling": {"stop": ["x"]}, "rows": [row]})
    (read,) = read_recording(path, RAW, identity=ModelIdentity(eos_token_ids=(2,)))
    assert [found.code for found in read.findings] == (["stop-overrun"] if said else [])


def test_sampling_fields_that_only_count_tokens_are_accepted(tmp_path: Path) -> None:
    sampling = {"ignore_eos": True, "max_tokens": 400, "seed": 7, "n": 2, "top_k": -1, "min_p": None}
    path = write(tmp_path / "r.json", {**TWO_ROWS, "sampling": sampling})
    assert provenance(path, RAW).sampling.neutral


def test_a_sampling_field_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", {**TWO_ROWS, "sampling": {"temperatur": 0.7}})
    with pytest.raises(ReplyError, match="`temperatur`") as caught:
        list(read_recording(path, RAW))
    assert caught.value.code == "provenance-missing"


@pytest.mark.parametrize(
    "sampling", [{"temperature": "hot"}, {"top_k": 1.5}, {"temperature": -1}, {"top_p": 0}]
)
def test_a_sampling_value_that_cannot_be_is_refused(tmp_path: Path, sampling: dict[str, object]) -> None:
    path = write(tmp_path / "r.json", {**TWO_ROWS, "sampling": sampling})
    with pytest.raises(ReplyError) as caught:
        list(read_recording(path, RAW))
    assert caught.value.code == "reply-malformed"
    assert next(iter(sampling)) in str(caught.value)


def test_presence_of_bias_lists_and_grammars_is_kept(tmp_path: Path) -> None:
    sampling = {"logit_bias": {"5": 1.0}, "bad_words": ["no"], "allowed_token_ids": [], "guided_regex": "a+"}
    said = provenance(write(tmp_path / "r.json", {**TWO_ROWS, "sampling": sampling}), RAW).sampling
    assert (said.logit_bias, said.bad_words, said.allowed_token_ids, said.structured_output) == (
        True,
        True,
        False,
        True,
    )


def test_what_neither_file_nor_statement_says_is_named_as_flags(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", TWO_ROWS)
    with pytest.raises(ReplyError) as caught:
        list(read_recording(path, Statement()))
    assert caught.value.code == "provenance-missing"
    assert caught.value.findings[0].fix == "state what was in force with --engine, --logprobs-mode"


def test_a_recording_without_sampling_needs_every_flag(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", {"rows": TWO_ROWS["rows"]})
    with pytest.raises(ReplyError) as caught:
        list(read_recording(path, RAW))
    fix = caught.value.findings[0].fix
    for name in SAMPLING_FIELDS:
        assert name.replace("_", "-") in fix
    assert "--temperature" in fix
    assert "--[no-]logit-bias" in fix


def test_a_statement_that_contradicts_the_recording_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", {**TWO_ROWS, "sampling": {"temperature": 0.7}})
    agreeing = Statement(engine="vllm", logprobs_mode="raw", temperature=0.7, top_k=-1)
    assert provenance(path, agreeing).sampling.temperature == 0.7
    with pytest.raises(ReplyError, match=r"--temperature 1.0\n") as caught:
        list(read_recording(path, Statement(engine="vllm", logprobs_mode="raw", temperature=1.0)))
    assert caught.value.code == "statement-contradicted"


def test_the_server_named_in_a_recording_is_never_read(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", {**TWO_ROWS, "server": "fp32_processed", "cond": "t07"})
    said = provenance(path, RAW)
    assert said.logprobs_mode == "raw"
    assert said.sampling.temperature == 1.0


def test_the_model_that_sampled_is_kept_in_the_provenance(tmp_path: Path) -> None:
    identity = ModelIdentity(
        tokenizer_fingerprint="ab", vocab_size=1536, eos_token_ids=(2, 4), bos_token_id=1
    )
    (first, _) = read_recording(write(tmp_path / "r.json", TWO_ROWS), RAW, identity=identity)
    assert first.sample is not None
    said = first.sample.provenances[0]
    assert (said.tokenizer_fingerprint, said.vocab_size) == ("ab", 1536)
    assert (said.eos_token_ids, said.bos_token_id) == ((2, 4), 1)


# -- reply wrappers ----------------------------------------------------------------------------------------


def test_a_wrapper_takes_from_the_request_what_it_says_and_the_rest_from_the_statement(
    data_dir: Path,
) -> None:
    path = data_dir / "replies" / "fp32_processed" / "completions_ids_lp1_t07.json"
    with pytest.raises(ReplyError) as caught:
        list(read_recording(path, PROCESSED))
    # The request says temperature 0.7; a server's generation_config may set the other four.
    assert caught.value.findings[0].fix.endswith("--top-p, --top-k, --min-p, --repetition-penalty")
    full = Statement(
        engine="vllm", logprobs_mode="processed", top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0
    )
    row = only_row(path, full)
    response = json.loads(path.read_text())["response"]["choices"][0]
    assert row.sample is not None
    assert row.sample.token_ids.tolist() == response["prompt_token_ids"] + response["token_ids"]
    assert row.sample.temperature[-1] == np.float32(0.7)
    lp = np.array(response["logprobs"]["token_logprobs"], np.float32)
    np.testing.assert_array_equal(row.sample.inference_logprobs[-len(lp) :], lp)


def test_a_generate_request_speaks_through_its_sampling_params_only() -> None:
    said = sampling_of_request({"temperature": 0.7, "top_k": -1}, Where())
    assert (said["temperature"], said["top_k"], said["presence_penalty"]) == (0.7, 0, 0.0)
    assert "top_p" not in said


@pytest.mark.parametrize(
    "request_fields",
    [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function"}},
        {"structured_outputs": {"choice": ["7"]}},
    ],
)
def test_a_request_for_a_grammar_is_structured_output(request_fields: dict[str, object]) -> None:
    assert sampling_of_request(request_fields, Where())["structured_output"] is True
    assert sampling_of_request({"response_format": {"type": "text"}}, Where())["structured_output"] is False


@pytest.mark.parametrize(
    "name",
    [
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding",
    ],
)
def test_a_grammar_field_means_the_same_here_and_to_the_parser(name: str) -> None:
    request = {"prompt": [1], "temperature": 1.0, name: {"choice": ["7"]}}
    said = sampling_of_request(request, Where())
    free = provenance_of({**said, "structured_output": False}, FULL, where=Where())
    bound = provenance_of(said, FULL, where=Where())
    assert bound.sampling.structured_output
    assert len(contradictions(request, "completions", free)) == 1
    assert contradictions(request, "completions", bound) == []


def test_each_choice_is_a_row_of_one_group(data_dir: Path) -> None:
    rows = list(read_recording(data_dir / "replies" / "fp32_raw" / "completions_n2_t1.json", FULL))
    assert [row.index for row in rows] == [0, 1]
    assert {row.sample.group_id for row in rows if row.sample is not None} == {"completions_n2_t1@0"}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("completions_stream_noids_lp0_usage", "ids-missing"),
        ("completions_noids_lp1", "ids-missing"),
        ("completions_ids_lpnone", "logprobs-missing"),
        ("error_chat_unknown_model", "reply-error-body"),
        ("error_completions_bad_json", "reply-error-body"),
    ],
)
def test_an_unusable_reply_is_refused_for_what_it_is(data_dir: Path, name: str, code: str) -> None:
    statement = Statement(
        engine="vllm", logprobs_mode="raw", top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0
    )
    path = data_dir / "replies" / "fp32_raw" / f"{name}.json"
    with pytest.raises(ReplyError) as caught:
        list(read_recording(path, statement))
    assert caught.value.code == code
    assert caught.value.findings[0].where.path == str(path)


def test_every_recorded_reply_is_read_or_refused_with_its_place(data_dir: Path) -> None:
    files = sorted((data_dir / "replies").glob("*/*.json"))
    read, errors = 0, []
    for file in files:
        mode: LogprobsMode = "processed" if "processed" in file.parent.name else "raw"
        statement = Statement(
            engine="vllm", logprobs_mode=mode, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0
        )
        try:
            read += bool(list(read_recording(file, statement)))
        except RlbatchError as error:
            errors.append((str(file), error))
    assert read + len(errors) == len(files) == 155
    assert read >= 60
    assert all({found.where.path for found in error.findings} == {file} for file, error in errors)


def test_a_request_that_contradicts_the_statement_is_refused(data_dir: Path) -> None:
    path = data_dir / "replies" / "fp32_processed" / "completions_ids_lp1_t07_topp08.json"
    with pytest.raises(ReplyError) as caught:
        list(read_recording(path, FULL))
    assert {found.code for found in caught.value.findings} == {"statement-contradicted"}
    assert {found.found for found in caught.value.findings} == {"--temperature 1.0", "--top-p 1.0"}


def test_a_wrapper_without_a_request_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "w.json", {"endpoint": "/v1/completions", "status": 200, "response": {}})
    with pytest.raises(ReplyError, match="without the request"):
        list(read_recording(path, FULL))


# -- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [7, [1, 5.0], {"text": "secret"}])
def test_a_recorded_prompt_in_no_form_that_a_request_has_is_a_fault_of_the_file(
    tmp_path: Path, data_dir: Path, prompt: object
) -> None:
    wrapper = json.loads((data_dir / "replies/fp32_raw/completions_prompt_as_ids.json").read_text())
    assert only_row(write(tmp_path / "r.json", wrapper), FULL_COLD).sample is not None
    wrapper["request"]["prompt"] = prompt
    path = write(tmp_path / "r.json", wrapper)
    with pytest.raises(ReplyError) as caught:
        list(read_recording(path, FULL_COLD))
    assert caught.value.code == "reply-malformed"
    assert caught.value.findings[0].where.path == str(path)
    assert "secret" not in str(caught.value)


def test_lines_of_jsonl_are_documents_of_either_kind(tmp_path: Path, data_dir: Path) -> None:
    reply = json.loads((data_dir / "replies" / "fp32_raw" / "completions_n2_t1.json").read_text())
    path = tmp_path / "r.jsonl"
    path.write_text(f"{json.dumps(TWO_ROWS)}\n\n{json.dumps(reply)}\n")
    rows = list(read_recording(path, FULL))
    assert [row.index for row in rows] == [0, 1, 2, 3]
    names = [row.sample.trajectory_id for row in rows if row.sample is not None]
    assert names == ["r:1#0", "r:1#1", "r:3#0", "r:3#1"]
    shares = [row.share for row in rows]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def refused_lines(data_dir: Path, path: Path) -> Path:
    """A reply, a request that the engine refused, one that a gateway refused, and a reply."""
    reply = json.loads((data_dir / "replies" / "fp32_raw" / "completions_n2_t1.json").read_text())
    body = {"error": {"message": "secret", "type": "RateLimit", "code": 429}}
    refused = {**reply, "status": 429, "response": body}
    gateway = {**refused, "status": 502, "response_text": "<html>"}
    del gateway["response"]
    return write(path, reply, refused, gateway, reply)


def test_a_request_that_the_engine_refused_is_named_by_its_line(tmp_path: Path, data_dir: Path) -> None:
    path = refused_lines(data_dir, tmp_path / "r.jsonl")
    with pytest.raises(ReplyError) as caught:
        list(read_recording(path, FULL_COLD))
    (found,) = caught.value.findings
    assert (found.code, found.severity, found.where.path) == ("reply-error-body", "error", str(path))
    assert found.found == "line 2: status 429, an error body (`error`): type RateLimit, code 429"
    assert "--skip-refused" in found.fix
    assert "secret" not in str(caught.value)


def test_refused_requests_are_skipped_where_that_is_asked_for_and_each_is_told(
    tmp_path: Path, data_dir: Path
) -> None:
    path = refused_lines(data_dir, tmp_path / "r.jsonl")
    rows = list(read_recording(path, FULL_COLD, skip_refused=True))
    # Two choices a reply; what was left out keeps its number.
    assert [(row.index, row.sample is not None) for row in rows] == [
        (0, True), (1, True), (2, False), (3, False), (4, True), (5, True)
    ]  # fmt: skip
    told = [found for row in rows for found in row.findings]
    assert [(found.code, found.severity, found.where.sample) for found in told] == [
        ("reply-error-body", "warning", 2),
        ("reply-error-body", "warning", 3),
    ]
    assert told[1].found == "line 3: status 502"


def test_a_file_of_refused_requests_only_is_unusable(tmp_path: Path, data_dir: Path) -> None:
    lines = refused_lines(data_dir, tmp_path / "r.jsonl").read_text().splitlines()
    path = tmp_path / "none.jsonl"
    path.write_text("\n".join(lines[1:3]))
    with pytest.raises(StorageError, match="2 requests, all refused by the engine"):
        list(read_recording(path, FULL_COLD, skip_refused=True))


def test_an_error_body_without_a_status_is_a_refused_request_too(tmp_path: Path, data_dir: Path) -> None:
    path = refused_lines(data_dir, tmp_path / "r.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()[:2]]
    del lines[1]["status"]
    rows = list(read_recording(write(path, *lines), FULL_COLD, skip_refused=True))
    assert [row.sample is not None for row in rows] == [True, True, False]


def test_lines_may_each_say_how_they_were_sampled(tmp_path: Path, data_dir: Path) -> None:
    """A flag speaks for the lines that are silent: the first says top_p 0.8, the second leaves it open."""
    names = ("completions_ids_lp1_t07_topp08", "completions_ids_lp1_t13")
    replies = [
        json.loads((data_dir / "replies/fp32_processed" / f"{name}.json").read_text()) for name in names
    ]
    statement = replace(FULL_COLD, logprobs_mode="processed")
    rows = read_recording(write(tmp_path / "r.jsonl", *replies), statement)
    said = [row.sample.provenances[0].sampling for row in rows if row.sample is not None]
    assert [(each.temperature, each.top_p) for each in said] == [(0.7, 0.8), (1.3, 1.0)]


def test_a_flag_that_no_line_needs_and_one_denies_is_refused_with_the_line(
    tmp_path: Path, data_dir: Path
) -> None:
    names = ("completions_ids_lp1_t07", "completions_ids_lp1_t13")
    replies = [
        json.loads((data_dir / "replies/fp32_processed" / f"{name}.json").read_text()) for name in names
    ]
    statement = replace(FULL, logprobs_mode="processed", temperature=0.7)
    with pytest.raises(ReplyError) as caught:
        list(read_recording(write(tmp_path / "r.jsonl", *replies), statement))
    (found,) = caught.value.findings
    assert (found.code, found.found) == ("statement-contradicted", "line 2: --temperature 0.7")


def test_a_line_that_is_not_json_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(f"{json.dumps(TWO_ROWS)}\n\n{{oops\n")
    with pytest.raises(StorageError, match="line 3: ") as caught:
        list(read_recording(path, RAW))
    assert caught.value.code == "file-unusable"
    assert caught.value.findings[0].expected == "JSON"


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_a_logprob_that_is_no_number_is_told_of_its_token(tmp_path: Path, word: str) -> None:
    """Python's json writes what no JSON is: the row has a fault, and the others are read."""
    text = json.dumps(TWO_ROWS).replace("-0.25", word)
    path = tmp_path / "r.jsonl"
    path.write_text(f"{json.dumps(TWO_ROWS)}\n{text}\n")
    rows = list(read_recording(path, RAW))
    assert [row.sample is not None for row in rows] == [True, True, False, True]
    (found,) = rows[2].findings
    assert (found.code, found.where.sample, found.where.trajectory) == ("logprob-not-finite", 2, "r:2#0")
    assert found.found.endswith("1 of 2 are NaN, infinite or beyond float32, at sampled token 1")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[1, 9]", "[1, NaN]", r"line 1: Expected `int`, got `float` - at `\$\.rows\[0\]\.prompt_ids\[1\]`"),
        ('"sampling": {}', '"sampling": {"temperature": NaN}', "line 1: .*temperature"),
    ],
)
def test_another_field_that_is_no_number_is_named_with_its_row_and_position(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(TWO_ROWS).replace(old, new, 1))
    with pytest.raises(RlbatchError, match=says):
        list(read_recording(path, RAW))


def test_a_number_in_a_reply_that_is_not_finite_is_named_by_its_place_and_no_text_is_shown(
    tmp_path: Path, data_dir: Path
) -> None:
    reply = json.loads((data_dir / "replies" / "fp32_raw" / "completions_n2_t1.json").read_text())
    reply["response"]["choices"][1]["logprobs"]["token_logprobs"][3] = float("nan")
    path = write(tmp_path / "r.jsonl", TWO_ROWS, reply)
    with pytest.raises(StorageError) as caught:
        list(read_recording(path, FULL_COLD))
    assert caught.value.findings[0].found == "line 2: nan at response.choices[1].logprobs.token_logprobs[3]"
    reply["response"]["choices"][0]["logprobs"]["top_logprobs"] = [{"secret": float("inf")}]
    with pytest.raises(
        StorageError, match=r"inf at response\.choices\[0\]\.logprobs\.top_logprobs\[0\]\.\(\.\.\.\)"
    ):
        list(read_recording(write(path, TWO_ROWS, reply), FULL_COLD))


def test_a_line_that_lacks_a_statement_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(f"{json.dumps(TWO_ROWS)}\n{json.dumps({'rows': TWO_ROWS['rows']})}\n")
    with pytest.raises(ReplyError, match="line 2: ") as caught:
        list(read_recording(path, RAW))
    assert caught.value.code == "provenance-missing"


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "{", '{"choices": []}', '{"rows": 3}', "\xff", '{"rows": [], "sampling": {}}']
)
def test_a_file_that_is_no_recording_is_unusable(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(StorageError, match=r"\[file-unusable\]") as caught:
        list(read_recording(path, FULL))
    assert caught.value.findings[0].where.path == str(path)


def test_an_empty_jsonl_is_unusable(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("\n")
    with pytest.raises(StorageError, match="at least one rollout"):
        list(read_recording(path, RAW))


def test_a_document_beyond_the_cap_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with path.open("wb") as file:
        # A hole: it takes no room on the disk.
        file.truncate(MAX_DOCUMENT_BYTES + 1)
    with pytest.raises(StorageError, match=r"at most 1,073,741,824 bytes") as caught:
        list(read_recording(path, RAW))
    assert "jsonl" in caught.value.findings[0].fix


def test_a_missing_file_is_unusable(tmp_path: Path) -> None:
    for name in ("none.json", "none.jsonl", "none.safetensors", "none"):
        with pytest.raises(StorageError) as caught:
            list(read_rows(tmp_path / name, RAW))
        assert caught.value.code == "file-unusable"


def test_a_file_of_another_suffix_is_refused_by_it(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.parquet"
    path.touch()
    with pytest.raises(StorageError, match=r"the suffix \.parquet"):
        read_rows(path, RAW)


def test_a_directory_stands_for_its_shards(tmp_path: Path) -> None:
    assert files_of(tmp_path) == [tmp_path]
    for name in ("b.safetensors", "a.safetensors", "notes.txt"):
        (tmp_path / name).touch()
    assert [file.name for file in files_of(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_a_stored_provenance_must_not_be_denied() -> None:
    stored = provenance_of({}, FULL_SAMPLING, where=Where())
    require_agreement([stored], Statement(), Where())
    require_agreement([stored], Statement(engine="vllm", temperature=1.0, top_k=-1), Where())
    for denial in (Statement(logprobs_mode="processed"), Statement(temperature=0.5)):
        with pytest.raises(ReplyError) as caught:
            require_agreement([stored], denial, Where(path="a"))
        assert caught.value.code == "statement-contradicted"


FULL_SAMPLING = Statement(
    engine="vllm",
    logprobs_mode="raw",
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias=False,
    allowed_token_ids=False,
    bad_words=False,
    min_tokens=0,
    structured_output=False,
)
