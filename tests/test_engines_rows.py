"""What a vLLM reply says twice: echoes, ids as strings, prompt_logprobs, alternatives, and older shapes."""

import json
import math
from typing import Any

import pytest
from test_engines import CHAT, COMPLETIONS, GENERATE, provenance_of, recorded, refused, reported

from rlbatch.engines import parse_response
from rlbatch.errors import ReplyError
from rlbatch.records import Turn

ECHO = "fp32_raw/completions_echo_lp1_ids.json"
SPELT = "fp32_raw/completions_asids_lp1.json"
PROMPT_LOGPROBS = ["fp32_raw/completions_ids_promptlp1.json", "fp32_raw/generate_promptlp1.json"]


def parsed(key: str, body: Any, request: Any = "own") -> Turn:
    own = recorded(key)[1]
    sent = own if request == "own" else request
    (turn,) = parse_response(body, request=sent, provenance=provenance_of(key, own))
    return turn


# -- echo: P + C rows, the first null ---------------------------------------------------------------------


@pytest.mark.parametrize("request_at_hand", [True, False])
def test_an_echo_gives_the_completions_rows_alone(request_at_hand):
    body, request = recorded(ECHO)
    choice = body["choices"][0]
    rows = choice["logprobs"]["token_logprobs"]
    assert (len(rows), rows[0], len(choice["prompt_token_ids"]), len(choice["token_ids"])) == (
        25,
        None,
        22,
        3,
    )
    turn = parsed(ECHO, body, request if request_at_hand else None)
    assert turn.completion_token_ids.tolist() == choice["token_ids"]
    assert reported(turn).tolist() == rows[22:]


def test_an_echo_without_completion_has_the_prompts_rows_only():
    """max_tokens=0: vLLM adds one id that has neither logprob nor text, and that nobody asked for."""
    body, request = recorded(ECHO)
    choice = body["choices"][0]
    del choice["token_ids"][1:]
    for rows in choice["logprobs"].values():
        del rows[22:]
    body["usage"].update(completion_tokens=1, total_tokens=23)
    turn = parsed(ECHO, body, {**request, "max_tokens": 0})
    assert len(turn.completion_token_ids) == len(reported(turn)) == 0
    assert turn.usage.num_completion_tokens is None
    # Any other request asked for that id, and its logprob is missing.
    for sent in (request, {**request, "max_tokens": False}, None):
        assert refused_with(ECHO, body, sent) == "length-mismatch"


def refused_with(key: str, body: Any, request: Any) -> str | None:
    with pytest.raises(ReplyError) as caught:
        parsed(key, body, request)
    return caught.value.code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda rows: rows.pop(), "length-mismatch"),
        (lambda rows: rows.pop(0), "length-mismatch"),
        (lambda rows: rows.insert(0, None), "length-mismatch"),
        (lambda rows: rows.__setitem__(0, -0.5), "length-mismatch"),
        (lambda rows: rows.__setitem__(7, None), "logprob-missing"),
        (lambda rows: rows.__setitem__(23, None), "logprob-missing"),
        # prompt_logprobs says the same of the prompt.
        (lambda rows: rows.__setitem__(7, -0.5), "statement-contradicted"),
        (lambda rows: rows.__setitem__(slice(7, 9), rows[8:6:-1]), "statement-contradicted"),
    ],
)
def test_an_echo_that_is_not_of_prompt_and_completion_is_refused(change, code):
    body, _ = recorded(ECHO)
    change(body["choices"][0]["logprobs"]["token_logprobs"])
    assert refused(ECHO, body).code == code


def test_a_request_that_denies_the_echo_makes_the_rows_too_many():
    body, request = recorded(ECHO)
    assert refused(ECHO, body, request={**request, "echo": False}).code == "echo-unsupported"


# -- ids as strings ---------------------------------------------------------------------------------------


def with_prompt_ids() -> tuple[Any, Any]:
    """The recorded reply to a text prompt, as if the prompt had been sent as its ids."""
    body, request = recorded(SPELT)
    ids = recorded("fp32_raw/completions_ids_lp1.json")[0]["choices"][0]["prompt_token_ids"]
    assert body["choices"][0]["token_ids"] is None
    return body, {**request, "prompt": ids}


def test_ids_are_read_from_strings_where_they_stand_nowhere_else():
    body, request = with_prompt_ids()
    turn = parsed(SPELT, body, request)
    # The same prompt and seed with return_token_ids.
    assert turn.completion_token_ids.tolist() == [572, 423, 331, 448]
    assert body["choices"][0]["logprobs"]["tokens"] == [f"token_id:{i}" for i in (572, 423, 331, 448)]


def test_text_offsets_count_the_strings_and_are_not_believed():
    body, request = with_prompt_ids()
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 12, 24, 36]
    body["choices"][0]["logprobs"]["text_offset"] = [9, 9, 9, 9]
    assert len(parsed(SPELT, body, request).completion_token_ids) == 4


@pytest.mark.parametrize("spelt", ["572", " Chen", "token_id:", "token_id:-1", "token_id:5x", "token_id:²"])
def test_a_string_that_spells_no_id_makes_the_ids_missing(spelt):
    body, request = with_prompt_ids()
    body["choices"][0]["logprobs"]["tokens"][2] = spelt
    assert refused_with(SPELT, body, request) == "ids-missing"


def test_a_string_too_many_is_a_length_mismatch():
    body, request = with_prompt_ids()
    body["choices"][0]["logprobs"]["tokens"].append("token_id:5")
    assert refused_with(SPELT, body, request) == "length-mismatch"
    body, _ = recorded(COMPLETIONS)
    body["choices"][0]["logprobs"]["tokens"].pop()
    assert refused(COMPLETIONS, body).code == "length-mismatch"


def rename_tokens(logprobs: Any, names: list[str]) -> None:
    """Other strings for the drawn tokens, among their alternatives too."""
    for at, (old, new) in enumerate(zip(logprobs["tokens"], names, strict=True)):
        said = logprobs["top_logprobs"][at]
        if said is not None:
            logprobs["top_logprobs"][at] = {new if key == old else key: said[key] for key in said}
    logprobs["tokens"] = names


def test_spelt_ids_of_an_echo_are_split_behind_the_prompts():
    body, request = recorded(ECHO)
    choice = body["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    rename_tokens(choice["logprobs"], [f"token_id:{token_id}" for token_id in ids])
    choice["token_ids"] = choice["prompt_token_ids"] = None
    turn = parsed(ECHO, body, {**request, "prompt": ids[:22]})
    assert turn.completion_token_ids.tolist() == ids[22:]
    assert turn.text is None
    choice["logprobs"]["tokens"][3] = "token_id:7"
    assert refused_with(ECHO, body, {**request, "prompt": ids[:22]}) == "statement-contradicted"


# -- prompt_logprobs: not kept, but not contradicted either -----------------------------------------------


def prompt_entries(body: Any) -> list[Any]:
    return body.get("prompt_logprobs") or body["choices"][0]["prompt_logprobs"]


@pytest.mark.parametrize("key", PROMPT_LOGPROBS)
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda entries: entries.pop(), "length-mismatch"),
        (lambda entries: entries.pop(0), "length-mismatch"),
        (lambda entries: entries.append({"5": {"logprob": -0.5}}), "length-mismatch"),
        (lambda entries: entries.__setitem__(4, None), "statement-contradicted"),
        (lambda entries: entries.__setitem__(4, {"1": {"logprob": -0.5}}), "statement-contradicted"),
        (lambda entries: entries.__setitem__(slice(4, 6), entries[5:3:-1]), "statement-contradicted"),
        (lambda entries: entries.__setitem__(4, 7), "reply-malformed"),
    ],
)
def test_prompt_logprobs_of_other_tokens_are_refused(key, change, code):
    body, _ = recorded(key)
    change(prompt_entries(body))
    assert refused(key, body).code == code


# -- alternatives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [CHAT, GENERATE])
def test_a_sampled_token_has_one_logprob_among_its_alternatives_and_outside(key):
    body, _ = recorded(key)
    entry = body["choices"][0]["logprobs"]["content"][3]
    assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    entry["logprob"] -= 0.25
    error = refused(key, body)
    assert error.code == "statement-contradicted"
    assert "choice 0: it differs, or is not there, at sampled token 3" in str(error)


def test_two_tokens_of_one_text_are_no_contradiction():
    body, _ = recorded(CHAT)
    entry = body["choices"][0]["logprobs"]["content"][3]
    entry["top_logprobs"].insert(0, {**entry["top_logprobs"][0], "logprob": -9.0})
    assert len(parsed(CHAT, body).completion_token_ids) == 8


# -- text -------------------------------------------------------------------------------------------------


def set_text(body: Any, text: str) -> None:
    choice = body["choices"][0]
    choice.update({"text": text} if "text" in choice else {"message": {"content": text}})


def text_in(body: Any) -> str:
    choice = body["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


TEXT_MODE = "fp32_raw/generate_text_mode.json"


@pytest.mark.parametrize("key", [COMPLETIONS, CHAT, TEXT_MODE])
@pytest.mark.parametrize(
    "change", [lambda text: text + "x", lambda text: "x" + text, lambda text: text[::-1]]
)
def test_a_text_that_is_not_made_of_the_tokens_is_refused(key, change):
    body, _ = recorded(key)
    set_text(body, change(text_in(body)))
    error = refused(key, body)
    assert error.code == "text-mismatch"
    assert text_in(body).strip() not in str(error)


@pytest.mark.parametrize("key", [COMPLETIONS, CHAT, TEXT_MODE])
@pytest.mark.parametrize(
    "change", [lambda text: text[:-5], lambda text: "", lambda text: text.replace(" ", "")]
)
def test_a_text_may_leave_out_stop_strings_special_tokens_and_spaces(key, change):
    body, _ = recorded(key)
    set_text(body, change(text_in(body)))
    assert len(parsed(key, body).completion_token_ids)


@pytest.mark.parametrize("string", ["\ufffd", "<0xE2>"])
def test_strings_that_stand_for_bytes_do_not_say_the_text(string):
    body, _ = recorded(COMPLETIONS)
    logprobs = body["choices"][0]["logprobs"]
    rename_tokens(logprobs, [string, *logprobs["tokens"][1:]])
    assert len(parsed(COMPLETIONS, body).completion_token_ids) == 12


# -- prompts said twice, and the older generate -----------------------------------------------------------


def test_prompt_ids_in_two_places_of_a_reply_must_agree():
    body, _ = recorded(COMPLETIONS)
    body["prompt_token_ids"] = list(body["choices"][0]["prompt_token_ids"])
    assert len(parsed(COMPLETIONS, body).prompt_token_ids) == 22
    body["prompt_token_ids"][3] += 1
    assert refused(COMPLETIONS, body).code == "statement-contradicted"


def test_total_tokens_is_the_sum():
    body, _ = recorded(COMPLETIONS)
    body["usage"]["total_tokens"] += 1
    assert refused(COMPLETIONS, body).code == "usage-mismatch"


def older(key: str = GENERATE) -> Any:
    """The recorded reply in the older shape: no usage, no spans, ids as strings beside the logprobs."""
    body, _ = recorded(key)
    choice = body["choices"][0]
    for entry in choice["logprobs"]["content"]:
        entry["token"] = f"token_id:{entry.pop('token_id')}"
        entry["top_logprobs"] = []
    return {
        "request_id": body["request_id"],
        "choices": [{name: choice[name] for name in ("index", "logprobs", "finish_reason", "token_ids")}],
        "prompt_logprobs": None,
    }


def test_the_older_generate_reply_gives_the_same_tokens():
    new, old = parsed(GENERATE, recorded(GENERATE)[0]), parsed(GENERATE, older())
    assert old.completion_token_ids.tolist() == new.completion_token_ids.tolist()
    assert math.fsum(reported(old).tolist()) == math.fsum(reported(new).tolist())
    assert old.policy_versions == ()
    body = older()
    body["choices"][0]["logprobs"]["content"][2]["token"] = "token_id:1"
    assert refused(GENERATE, body).code == "statement-contradicted"


def test_the_callers_name_for_the_request_is_in_every_finding():
    body, request = recorded(COMPLETIONS)
    wrong = {**request, "temperature": 0.5, "top_p": 0.5}
    with pytest.raises(ReplyError) as caught:
        parse_response(
            json.dumps(body), request=wrong, provenance=provenance_of(COMPLETIONS, request), request_id="r-7"
        )
    assert [found.where.request for found in caught.value.findings] == ["r-7", "r-7"]
    assert "request 'r-7'" in str(caught.value)
