"""Routed experts from the reply to the batch: recorded rows of a real engine, as numpy itself reads them."""

import base64
import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import provenance, sample, trajectory, turn
from engines_expected import MOE_EXPECTED, ROUTED, Choice, Refused

from rlbatch.assemble import to_samples
from rlbatch.collate import Padding, collate
from rlbatch.engines import ResponseAssembler, parse_response
from rlbatch.errors import RecordError, ReplyError, StorageError
from rlbatch.records import Provenance, SamplingParams, Trajectory, Turn, identical
from rlbatch.storage import open_reader, open_writer, write_shard
from rlbatch.storage.recordings import read_recording
from rlbatch.storage.statements import Statement

MOE = Path(__file__).parent / "data" / "moe-vllm-0.32.0"
PLAIN = "fp32/completions_ids_lp1.json"
FROM_10 = "fp32/completions_prompt_start_10.json"


def recorded(key: str) -> tuple[Any, Any]:
    recording = json.loads((MOE / "replies" / key).read_text())
    return recording.get("response", recording.get("sse")), recording["request"]


def provenance_of(request: dict[str, Any]) -> Provenance:
    temperature = (request.get("sampling_params") or request)["temperature"]
    return provenance(logprobs_mode="raw", sampling=SamplingParams(temperature=temperature))


def parse(key: str, body: Any = None, request: Any = "own") -> list[Turn]:
    own_body, own = recorded(key)
    sent = own if request == "own" else request
    body = own_body if body is None else body
    if isinstance(body, str):
        assembler = ResponseAssembler(request=sent, provenance=provenance_of(own))
        assembler.feed(body)
        return assembler.finish()
    return parse_response(body, request=sent, provenance=provenance_of(own))


def code_of(key: str, body: Any = None, request: Any = "own") -> str | None:
    with pytest.raises(ReplyError) as caught:
        parse(key, body, request)
    return caught.value.code


def npy(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def text_of(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def with_routing(value: Any, key: str = PLAIN) -> Any:
    body, _ = recorded(key)
    body["choices"][0]["routed_experts"] = value
    return body


# -- every recorded reply ---------------------------------------------------------------------------------


def test_table_names_every_recorded_reply_and_nothing_else():
    root = MOE / "replies"
    assert {path.relative_to(root).as_posix() for path in root.rglob("*.json")} == set(MOE_EXPECTED)


@pytest.mark.parametrize("key", MOE_EXPECTED)
def test_recorded_reply_gives_the_numbers_of_the_table(key):
    expected = MOE_EXPECTED[key]
    if isinstance(expected, Refused):
        with pytest.raises(ReplyError) as caught:
            parse(key)
        assert caught.value.code == expected.code
        assert expected.says in str(caught.value)
        return
    turns = parse(key)
    assert [summary(each) for each in turns] == expected
    for each in turns:
        if key not in ROUTED:
            # Streams of completions and chat carry no routing.
            assert each.routed_experts is None
            continue
        shape, dtype, start = ROUTED[key]
        assert (each.routed_experts.shape, each.routed_experts.dtype.name) == (shape, dtype)
        assert each.routed_experts_start == start


def summary(each: Turn) -> Choice:
    values = each.inference_logprobs if each.raw_inference_logprobs is None else each.raw_inference_logprobs
    ids = each.completion_token_ids.tolist()
    total = round(float(values.astype(np.float64).sum()), 6)
    first, last = (ids[0], ids[-1]) if ids else (-1, -1)
    reason = each.finish_reason or ""
    return Choice(len(each.prompt_token_ids), len(ids), reason, each.stop_reason, total, first, last)


@pytest.mark.parametrize("key", ROUTED)
def test_rows_are_those_that_numpys_own_reader_finds(key):
    body, _ = recorded(key)
    for each, choice in zip(parse(key), body["choices"], strict=True):
        rows = npy(choice["routed_experts"])
        # Of an echo without completion: the last pass predicted what nobody asked for.
        rows = rows[:-1] if key == "fp32/completions_echo_max0.json" else rows
        assert identical(each.routed_experts, rows)


def test_ids_of_300_experts_need_two_bytes_and_dense_layers_keep_their_place():
    (each,) = parse("fp32_300experts_dense_layer0/completions_ids_lp1.json")
    assert int(each.routed_experts.max()) > 255
    assert not each.routed_experts[:, 0].any()


def test_the_start_comes_from_the_request_or_from_the_count():
    assert parse(FROM_10)[0].routed_experts_start == 10
    assert parse(FROM_10, request=None)[0].routed_experts_start == 10
    _, request = recorded(FROM_10)
    for start in (9, 11, 0, None, "10", True, -1):
        assert code_of(FROM_10, request={**request, "routed_experts_prompt_start": start}) == (
            "routed-experts-mismatch"
        )
    # A generate request has it among its sampling params, and nowhere else.
    key = "fp32/generate_turn2_from_start.json"
    _, request = recorded(key)
    moved = copy.deepcopy(request)
    moved["routed_experts_prompt_start"] = moved["sampling_params"].pop("routed_experts_prompt_start")
    assert code_of(key, request=moved) == "routed-experts-mismatch"


@pytest.mark.parametrize("request_at_hand", [True, False])
def test_a_row_too_many_is_refused_and_so_is_one_too_few_where_the_start_is_known(request_at_hand):
    request = recorded(PLAIN)[1] if request_at_hand else None
    rows = npy(recorded(PLAIN)[0]["choices"][0]["routed_experts"])
    more = np.concatenate([rows, rows[-1:]])
    assert code_of(PLAIN, with_routing(text_of(more)), request) == "routed-experts-mismatch"
    if request_at_hand:
        assert code_of(PLAIN, with_routing(text_of(rows[:-1])), request) == "routed-experts-mismatch"
    # Fewer rows than the completion has passes begin behind the prompt, which no request can ask for.
    assert code_of(PLAIN, with_routing(text_of(rows[-6:])), request) == "routed-experts-mismatch"


ROWS = np.zeros((29, 3, 2), np.uint8)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "k05VTVBZ",
        "not base64!",
        "é",
        7,
        {},
        [],
        True,
        text_of(ROWS)[:-4],
        text_of(ROWS) + "AAAA",
        base64.b64encode(base64.b64decode(text_of(ROWS))[:-1]).decode(),
        text_of(ROWS.astype(np.int64)),
        text_of(ROWS.astype(np.float32)),
        text_of(ROWS.astype(">u2")),
        text_of(np.asfortranarray(ROWS)),
        text_of(ROWS[0]),
        text_of(ROWS[None]),
        text_of(np.zeros((29, 0, 2), np.uint8)),
        text_of(np.full((29, 3, 2), -1, np.int32)),
        # A pickle.
        "gASVAAAAAAAAAA==",
    ],
)
def test_what_is_no_array_of_experts_is_malformed(value):
    assert code_of(PLAIN, with_routing(value)) == "routed-experts-malformed"


def test_a_header_that_claims_more_than_there_is_allocates_nothing():
    raw = base64.b64decode(text_of(ROWS)).replace(b"(29, 3, 2), }      ", b"(999999999, 3, 2), ")
    assert code_of(PLAIN, with_routing(base64.b64encode(raw).decode())) == "routed-experts-malformed"


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_each_width_of_expert_ids_is_kept(dtype):
    rows = np.arange(29 * 6).reshape(29, 3, 2).astype(dtype)
    (each,) = parse(PLAIN, with_routing(text_of(rows)))
    assert identical(each.routed_experts, rows)


def test_generate_streams_carry_the_rows_on_a_choices_last_chunk():
    body, _ = recorded("fp32/generate_turn1.json")
    (choice,) = body["choices"]
    entries = choice["logprobs"]["content"]
    chunks = []
    for at, entry in enumerate(entries):
        last = at == len(entries) - 1
        part = {name: choice[name] if last else None for name in ("finish_reason", "stop_reason")}
        part |= {name: choice[name] if last else None for name in ("routed_experts", "weight_versions")}
        part |= {"index": 0, "token_ids": [choice["token_ids"][at]], "logprobs": {"content": [entry]}}
        chunks.append({"request_id": body["request_id"], "usage": None, "choices": [part]})
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    (streamed,), (whole,) = parse("fp32/generate_turn1.json", stream), parse("fp32/generate_turn1.json")
    assert identical(streamed.routed_experts, whole.routed_experts)
    assert streamed.policy_versions == whole.policy_versions
    chunks[3]["choices"][0]["routed_experts"] = choice["routed_experts"]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    assert code_of("fp32/generate_turn1.json", stream) == "stream-disordered"


# -- turns into samples -----------------------------------------------------------------------------------


def two_turns() -> tuple[Turn, Turn]:
    (first,), (second,) = parse("fp32/generate_turn1.json"), parse("fp32/generate_turn2_from_start.json")
    return first, second


def test_recorded_turns_concatenate_at_the_rows_already_held():
    first, second = two_turns()
    held = len(first.prompt_token_ids) + len(first.completion_token_ids) - 1
    assert (held, second.routed_experts_start) == (44, 44)
    (made,) = to_samples(Trajectory(trajectory_id="t", turns=(first, second)))
    assert made.routed_experts.shape == (65, 3, 2)  # 60 + 6 - 1
    assert identical(made.routed_experts[:44], first.routed_experts)
    assert identical(made.routed_experts[44:], second.routed_experts)


def routed(prompt: list[int], ids: list[int], *, start: int = 0, base: int = 0, **changes: Any) -> Turn:
    """Row r holds base + token position, in every layer and place."""
    num_rows = len(prompt) + len(ids) - 1 - start
    rows = np.arange(start, start + num_rows, dtype=np.uint8)[:, None, None] + np.zeros((1, 3, 2), np.uint8)
    fields = {"routed_experts": rows + np.uint8(base), "routed_experts_start": start} | changes
    return turn(prompt, ids, [-0.5] * len(ids), **fields)


FIRST = ([1, 5], [7, 2])
SECOND = ([1, 5, 7, 2, 9], [8])


def test_rows_said_again_are_those_that_were_in_force_when_the_tokens_were_drawn():
    # Held: rows 0, 1, 2. The second turn says 0..4 again, as 100..104.
    (made,) = to_samples(trajectory(routed(*FIRST), routed(*SECOND, base=100)))
    assert made.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 103, 104]
    (made,) = to_samples(trajectory(routed(*FIRST), routed(*SECOND, start=3, base=100)))
    assert made.routed_experts[:, 2, 1].tolist() == [0, 1, 2, 103, 104]


def test_a_gap_between_turns_is_refused():
    """T1 instead of T1 - 1: the row of the first turn's last token is in neither."""
    with pytest.raises(RecordError, match=r"turn 1: expected routed experts from token 3 on.*found 4"):
        to_samples(trajectory(routed(*FIRST), routed(*SECOND, start=4)))
    with pytest.raises(RecordError, match=r"turn 0: expected routed experts from token 0 on.*found 1"):
        to_samples(trajectory(routed(*FIRST, start=1)))


def test_a_branch_cannot_lean_on_rows_of_another_sequence():
    other = ([1, 6, 7, 2, 9], [8])
    with pytest.raises(RecordError, match=r"turn 1: expected routed experts from token 0 on.*found 3"):
        to_samples(trajectory(routed(*FIRST), routed(*other, start=3)))
    made = to_samples(trajectory(routed(*FIRST), routed(*other)))
    assert [len(each.routed_experts) for each in made] == [3, 5]


def test_turns_of_one_sample_have_all_or_none_and_of_one_kind():
    bare = turn(*SECOND, [-0.5])
    with pytest.raises(RecordError, match="found them in 1 of 2"):
        to_samples(trajectory(routed(*FIRST), bare))
    with pytest.raises(RecordError, match="found them in 1 of 2"):
        to_samples(trajectory(turn(*FIRST, [-0.5, -0.5]), routed(*SECOND)))
    wide = routed(*SECOND, routed_experts=np.zeros((5, 3, 2), np.uint16))
    with pytest.raises(RecordError, match=r"of uint8 \[.., 3, 2\] as before, found uint16"):
        to_samples(trajectory(routed(*FIRST), wide))
    deep = routed(*SECOND, routed_experts=np.zeros((5, 2, 3), np.uint8))
    with pytest.raises(RecordError, match="as before"):
        to_samples(trajectory(routed(*FIRST), deep))


@pytest.mark.parametrize(
    "changes",
    [
        {"routed_experts": np.zeros((2, 3, 2), np.uint8)},
        {"routed_experts": np.zeros((3, 3), np.uint8)},
        {"routed_experts": np.zeros((3, 0, 2), np.uint8)},
        {"routed_experts": np.zeros((3, 3, 2), np.int64)},
        {"routed_experts": np.full((3, 3, 2), -1, np.int32)},
        {"routed_experts": [[[0]]]},
        {"routed_experts_start": 1},
        {"routed_experts_start": -1},
        {"routed_experts_start": True},
        {"routed_experts": None, "routed_experts_start": 1},
    ],
)
def test_a_turn_has_a_row_for_each_pass_from_its_start(changes):
    with pytest.raises(RecordError, match=r"Turn\.routed_experts"):
        routed(*FIRST, **changes)


def test_records_keep_the_rows_read_only():
    (made,) = to_samples(trajectory(routed(*FIRST)))
    with pytest.raises(ValueError, match="read-only"):
        made.routed_experts[0, 0, 0] = 1


# -- storage: identity ------------------------------------------------------------------------------------


def varied() -> list[Any]:
    """Samples with rows of every width, without any, and of one token only."""
    wide = routed([1, 5, 4], [7], routed_experts=np.arange(9, dtype=np.uint16).reshape(3, 1, 3) + 300)
    long = routed([1], [7, 2], routed_experts=np.full((2, 2, 2), 2**31 - 1, np.int32))
    alone = routed([1], [])
    turns = [routed(*FIRST), turn([1, 2], [3], [-0.1]), wide, long, alone]
    return [
        each
        for index, one in enumerate(turns)
        for each in to_samples(trajectory(one, trajectory_id=f"t{index}"))
    ]


def test_shards_keep_the_rows_by_identity(tmp_path):
    samples = varied()
    assert len(samples[-1].token_ids) == 1
    assert samples[-1].routed_experts.shape == (0, 3, 2)
    write_shard(tmp_path / "a.safetensors", samples)
    reader = open_reader(tmp_path / "a.safetensors")
    for given, read in zip(samples, reader, strict=True):
        assert identical(given, read)
    for index, given in enumerate(samples):
        assert identical(given, reader[index])


def test_shards_without_any_rows_have_no_such_array(tmp_path):
    plain = sample([1, 2], [3], [-0.1])
    write_shard(tmp_path / "plain.safetensors", [plain])
    assert b"routed_experts" not in (tmp_path / "plain.safetensors").read_bytes()
    assert open_reader(tmp_path / "plain.safetensors")[0].routed_experts is None


def test_real_rows_survive_a_directory_of_shards(tmp_path):
    samples = recorded_rollouts("rollouts_bf16.json")
    assert len(samples) == 64
    with open_writer(tmp_path / "shards", max_samples=10) as writer:
        for each in samples:
            writer.append(each)
    for given, read in zip(samples, open_reader(tmp_path / "shards"), strict=True):
        assert identical(given, read)


def recorded_rollouts(name: str) -> list[Any]:
    """The rows of a recorded rollout file, read here by hand."""
    rows = json.loads((MOE / name).read_text())["rows"]
    return [
        sample(
            row["prompt_ids"],
            row["ids"],
            row["lp"],
            routed_experts=npy(row["routed_experts"]),
            trajectory_id=f"row{index}",
        )
        for index, row in enumerate(rows)
    ]


def test_an_altered_row_fails_its_checksum(tmp_path):
    path = tmp_path / "a.safetensors"
    write_shard(path, recorded_rollouts("rollouts.json"))
    raw = bytearray(path.read_bytes())
    # The array of bytes is the last but for other bytes: look for the first sample's own rows.
    at = raw.index(recorded_rollouts("rollouts.json")[0].routed_experts.tobytes())
    raw[at + 3] ^= 1
    path.write_bytes(raw)
    reader = open_reader(path)
    with pytest.raises(StorageError, match="routed_experts"):
        reader.verify()


def test_recordings_keep_the_rows_and_refuse_a_lost_one(tmp_path):
    statement = Statement(
        engine="vllm",
        logprobs_mode="raw",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
    )
    rows = list(read_recording(MOE / "rollouts.json", statement))
    assert len(rows) == 16
    for row, by_hand in zip(rows, recorded_rollouts("rollouts.json"), strict=True):
        assert identical(row.sample.routed_experts, by_hand.routed_experts)
    content = json.loads((MOE / "rollouts.json").read_text())
    content["rows"][3]["routed_experts"] = text_of(npy(content["rows"][3]["routed_experts"])[1:])
    (tmp_path / "lost.json").write_text(json.dumps(content))
    found = [row for row in read_recording(tmp_path / "lost.json", statement) if row.sample is None]
    assert [(row.index, row.findings[0].code) for row in found] == [(3, "routed-experts-mismatch")]
    assert found[0].findings[0].where.sample == 3


# -- batches: rows stay with their input token ------------------------------------------------------------


def test_padded_rows_stay_with_their_input_token():
    short, long = (
        to_samples(trajectory(routed(*FIRST)))[0],
        to_samples(trajectory(routed(*SECOND, base=50)))[0],
    )
    right = collate([short, long], layout="padded")
    assert right.routed_experts.dtype == torch.int32
    assert right.routed_experts.shape == (2, 6, 3, 2)
    # Rows 0, 1, 2 of tokens 0, 1, 2; the last token was not passed through, and what follows is padding.
    assert right.routed_experts[0, :, 0, 0].tolist() == [0, 1, 2, -1, -1, -1]
    assert right.routed_experts[1, :, 2, 1].tolist() == [50, 51, 52, 53, 54, -1]
    left = collate([short, long], layout="padded", padding=Padding(side="left"))
    assert left.routed_experts[0, :, 0, 0].tolist() == [-1, -1, 0, 1, 2, -1]


def test_packed_rows_stay_with_their_input_token():
    short, long = (
        to_samples(trajectory(routed(*FIRST)))[0],
        to_samples(trajectory(routed(*SECOND, base=50)))[0],
    )
    batch = collate([short, long], layout="packed")
    assert batch.routed_experts[0, :, 1, 1].tolist() == [0, 1, 2, -1, 50, 51, 52, 53, 54, -1]
    moved = batch.to("cpu")
    assert torch.equal(moved.routed_experts, batch.routed_experts)


def test_a_batch_keeps_the_rows_of_those_that_have_some_and_all_are_of_one_shape():
    short = to_samples(trajectory(routed(*FIRST)))[0]
    assert collate([sample([1], [2], [-0.5])], layout="packed").routed_experts is None
    mixed = collate([sample([1], [2], [-0.5]), short], layout="packed")
    assert mixed.routed_experts[0, :, 1, 1].tolist() == [-1, -1, 0, 1, 2, -1]
    other = to_samples(trajectory(routed([1], [2], routed_experts=np.zeros((1, 3, 4), np.uint8))))[0]
    with pytest.raises(RecordError, match=r"\[3, 2\] and \[3, 4\]"):
        collate([short, other], layout="padded")


def test_real_rows_reach_the_batch_at_their_tokens():
    samples = recorded_rollouts("rollouts.json")
    for layout in ("padded", "packed"):
        batch = collate(samples, layout=layout)
        for ref, row, each in zip(batch.refs, range(len(samples)), samples, strict=True):
            at = (row if layout == "padded" else 0, slice(ref.token_offset, ref.token_offset + len(each)))
            assert batch.input_ids[at].tolist() == each.token_ids.tolist()
            assert batch.routed_experts[at][:-1].tolist() == each.routed_experts.tolist()
