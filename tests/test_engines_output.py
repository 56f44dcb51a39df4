"""`to_turn`, the rules that hold for every engine, on outputs written out by hand."""

from typing import Any

import numpy as np
import pytest

from rlbatch.engines.output import EngineOutput, to_turn
from rlbatch.errors import ReplyError, Where
from rlbatch.records import Provenance, SamplingParams, Usage, VersionSpan


def provenance(mode: Any = "processed", temperature: float = 0.7) -> Provenance:
    return Provenance(engine="e", logprobs_mode=mode, sampling=SamplingParams(temperature=temperature))


def output(**changes: Any) -> EngineOutput:
    fields = {
        "label": "row 3",
        "prompt_token_ids": [1, 5],
        "completion_token_ids": [7, 8, 2],
        "logprobs": [-0.5, -0.25, 0.0],
        "finish_reason": "stop",
        "stop_reason": 2,
        "policy_versions": (VersionSpan(label="9", start=0, stop=3),),
        "usage": Usage(num_prompt_tokens=2, num_completion_tokens=3),
        "text": "text",
        "request_id": "id",
    }
    return EngineOutput(**{**fields, **changes})


def refusal(**changes: Any) -> ReplyError:
    with pytest.raises(ReplyError) as caught:
        to_turn(output(**changes), provenance())
    return caught.value


def test_every_field_reaches_the_turn():
    turn = to_turn(output(), provenance())
    assert turn.prompt_token_ids.tolist() == [1, 5]
    assert turn.completion_token_ids.tolist() == [7, 8, 2]
    assert turn.inference_logprobs.tolist() == [-0.5, -0.25, 0.0]
    assert turn.raw_inference_logprobs is None
    assert (turn.finish_reason, turn.stop_reason, turn.text, turn.request_id) == ("stop", 2, "text", "id")
    assert turn.policy_versions == (VersionSpan(label="9", start=0, stop=3),)
    assert turn.usage == Usage(num_prompt_tokens=2, num_completion_tokens=3)
    assert turn.provenance == provenance()


@pytest.mark.parametrize("mode", ["raw", "unknown"])
def test_values_of_another_distribution_are_kept_as_raw(mode):
    turn = to_turn(output(), provenance(mode))
    assert np.isnan(turn.inference_logprobs).tolist() == [True] * 3
    assert turn.raw_inference_logprobs.tolist() == [-0.5, -0.25, 0.0]
    neutral = to_turn(output(), provenance(mode, temperature=1.0))
    assert neutral.inference_logprobs.tolist() == [-0.5, -0.25, 0.0]
    assert neutral.raw_inference_logprobs is None


def test_what_the_engine_did_not_say_stays_unsaid():
    unsaid = {
        "finish_reason": None,
        "stop_reason": None,
        "policy_versions": (),
        "text": None,
        "request_id": None,
    }
    turn = to_turn(output(**unsaid, usage=Usage()), provenance())
    assert (turn.finish_reason, turn.stop_reason, turn.text, turn.request_id) == (None, None, None, None)
    assert turn.policy_versions == ()


@pytest.mark.parametrize(
    ("changes", "code", "found"),
    [
        ({"completion_token_ids": None}, "ids-missing", "row 3: no ids"),
        ({"prompt_token_ids": None}, "prompt-ids-missing", "row 3: none in reply or request"),
        ({"prompt_token_ids": []}, "prompt-ids-missing", "row 3: an empty list"),
        ({"logprobs": None}, "logprobs-missing", "row 3: no logprobs"),
        ({"logprobs": []}, "length-mismatch", "row 3: 0 logprobs for 3 ids: 3 ids too many"),
        ({"logprobs": [-0.5] * 4}, "length-mismatch", "row 3: 4 logprobs for 3 ids: 1 logprobs too many"),
        # Two too many, and the prompt has two tokens.
        (
            {"logprobs": [None, *[-0.5] * 4]},
            "echo-unsupported",
            "row 3: 5 logprobs for 3 ids: 2 logprobs too many, which is the length of the prompt",
        ),
        ({"logprobs": [-0.5, None, -0.5]}, "logprob-missing", "row 3: 1 of 3 are null, at sampled token 1"),
        (
            {"logprobs": [float("nan"), -0.5, float("-inf")]},
            "logprob-not-finite",
            "row 3: 2 of 3 are NaN, infinite or beyond float32, at sampled token 0, 2",
        ),
        ({"finish_reason": "cancelled"}, "reply-malformed", "row 3: 'cancelled'"),
        (
            {"policy_versions": (VersionSpan(label="9", start=0, stop=2),)},
            "statement-contradicted",
            "row 3: 1 spans: 0:2",
        ),
    ],
)
def test_each_fault_is_refused_with_its_place(changes, code, found):
    where = Where(path="rollouts.json", sample=3)
    error = refusal(**changes, where=where)
    assert (error.code, error.findings[0].found, error.findings[0].where) == (code, found, where)


def test_the_whole_range_of_float32_passes_without_a_warning():
    largest = float(np.finfo(np.float32).max)
    turn = to_turn(output(logprobs=[-largest, 1e-60, -0.0]), provenance())
    assert turn.inference_logprobs.tolist() == [-largest, 0.0, 0.0]
