"""Recorded conversations whose later prompts are the engine's own, or made by the model's template from text.

Replies become turns by `parse_response`, as in use. Beside the breaks in `test_assemble`: what a client does
to a history as a whole.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from builders import trajectory, turn
from transformers import AutoTokenizer

from rlbatch.assemble import prefix_findings, to_samples
from rlbatch.engines import parse_response
from rlbatch.errors import Finding
from rlbatch.records import Provenance, SamplingParams, Turn

TURNS = "replies/fp32_raw/chat_multi_turn_t0.json"


@pytest.fixture(scope="module")
def tokenizer(tinylm_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tinylm_dir)


@pytest.fixture
def pair(data_dir: Path) -> dict[str, Any]:
    """Two recorded turns of one conversation, greedy, with their requests."""
    pair: dict[str, Any] = json.loads((data_dir / TURNS).read_text())["turns"][0]
    return pair


def parsed(exchange: dict[str, Any]) -> Turn:
    request = exchange["request"]
    sampling = SamplingParams(temperature=request["temperature"])
    provenance = Provenance(engine="vllm", logprobs_mode="raw", sampling=sampling)
    (made,) = parse_response(exchange["response"], request=request, provenance=provenance)
    return made


def only_finding(*turns: Turn) -> Finding:
    made = trajectory(*turns)
    (found,) = prefix_findings(made)
    # Branched: each sampled token is in one sample, and the break is before the new branch's own tokens.
    samples = to_samples(made)
    assert [sample.num_siblings for sample in samples] == [2, 2]
    num_trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert num_trained == sum(len(each.completion_token_ids) for each in turns)
    return found


def rendered(tokenizer: Any, messages: list[dict[str, Any]], **changes: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **changes
    )
    return ids


def test_the_engines_own_two_turns_are_one_sample(pair):
    turns = parsed(pair["turn1"]), parsed(pair["turn2"])
    assert prefix_findings(trajectory(*turns)) == ()
    (made,) = to_samples(trajectory(*turns))
    assert int(made.loss_mask.sum()) == sum(len(each.completion_token_ids) for each in turns)


def test_the_template_makes_the_engines_prompt_from_the_messages(pair, tokenizer):
    """Else the two tests below would be about another template."""
    request = pair["turn1"]["request"]
    ids = rendered(tokenizer, request["messages"], tools=request.get("tools"))
    assert ids == pair["turn1"]["response"]["prompt_token_ids"]


def test_a_question_that_was_edited_is_another_prompt(pair, tokenizer):
    first, request = parsed(pair["turn1"]), pair["turn1"]["request"]
    edited = [dict(each) for each in request["messages"]]
    edited[-1]["content"] = "No: " + edited[-1]["content"]
    prompt = rendered(tokenizer, edited, tools=request.get("tools"))
    found = only_finding(first, turn(prompt, [6], [-0.5]))
    start = next(at for at, (a, b) in enumerate(zip(first.prompt_token_ids, prompt, strict=False)) if a != b)
    assert 0 < start < len(first.prompt_token_ids)
    assert found.where.start == start
    assert found.found.startswith("another prompt: ")


def test_a_question_asked_again_without_its_answer_is_shortened(pair, tokenizer):
    first, request = parsed(pair["turn1"]), pair["turn1"]["request"]
    prompt = rendered(tokenizer, request["messages"], tools=request.get("tools"))
    found = only_finding(first, turn(prompt, [6], [-0.5]))
    assert found.where.start == len(first.prompt_token_ids)
    assert found.found.startswith("shortened: ")


def test_an_answer_cut_short_and_carried_on_by_the_client_is_shortened(pair):
    """As a client does that prefills the next answer with the beginning of this one."""
    first = parsed(pair["turn1"])
    kept = [*first.prompt_token_ids.tolist(), *first.completion_token_ids.tolist()[:4]]
    found = only_finding(first, turn(kept, [6], [-0.5]))
    assert found.where.start == len(kept)
    assert found.found.startswith("shortened: ")
