"""The logprob head: what it refuses, what it leaves behind, and the proof that a model's logits are known."""

import gc
import pickle
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import scoring_cases as cases
import torch
import transformers
from torch import nn

from rlbatch.collate import collate
from rlbatch.errors import ScoringError
from rlbatch.scoring import logprob_head, model_inputs, trainer_logprobs
from rlbatch.scoring.proof import require_known_head
from rlbatch.scoring.transforms import KNOBS
from rlbatch_kernels import TokenRangeError

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def padded():
    return collate(cases.make_samples(), layout="padded")


# -- what is left behind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(cases.CONFIGS))
def test_the_model_is_as_before_when_the_context_is_left(name):
    model = cases.tiny_model(name)
    batch = padded()
    head, config = model.lm_head, model.config.to_dict()
    before = model(**model_inputs(batch)).logits
    with logprob_head(model, batch):
        assert model.lm_head is head
        assert model(**model_inputs(batch)).logits.shape == batch.target_ids.shape
    assert model.lm_head is head
    assert "forward" not in vars(head)
    assert model.config.to_dict() == config
    assert torch.equal(model(**model_inputs(batch)).logits, before)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite"])
def test_the_model_is_as_before_when_the_body_raises(name):
    model = cases.tiny_model(name)
    batch = padded()
    scale = getattr(model, "logit_scale", None)
    config = model.config.to_dict()
    before = model(**model_inputs(batch)).logits
    with pytest.raises(ZeroDivisionError), logprob_head(model, batch):
        raise ZeroDivisionError
    assert "forward" not in vars(model.lm_head)
    assert model.config.to_dict() == config
    assert getattr(model, "logit_scale", None) == scale
    assert torch.equal(model(**model_inputs(batch)).logits, before)


def test_the_model_is_as_before_when_the_proof_fails():
    model = cases.tiny_model("gemma2", cls=_SecondCap).train()
    with pytest.raises(ScoringError), logprob_head(model, padded()):
        pass
    assert "forward" not in vars(model.lm_head)
    assert model.config.final_logit_softcapping == 5.0
    assert all(module.training for module in model.modules())


def test_modes_and_gradients_of_the_model_survive_the_proof():
    model = cases.tiny_model("llama").train()
    model.model.norm.eval()
    assert trainer_logprobs(model, padded()).requires_grad
    assert model.training
    assert model.lm_head.training
    assert not model.model.norm.training


# -- models whose logits are changed -------------------------------------------------------------------------


def _tied(config):
    config.tie_word_embeddings = True
    return config


_MORE = {
    "Cohere2ForCausalLM": lambda: transformers.Cohere2Config(**_SIZES, logit_scale=0.3),
    "Gemma3ForCausalLM": lambda: transformers.Gemma3TextConfig(
        **_SIZES, head_dim=8, final_logit_softcapping=5.0
    ),
    "Gemma3nForCausalLM": lambda: transformers.Gemma3nTextConfig(
        **{**_SIZES, "intermediate_size": [48, 48]},
        head_dim=8,
        vocab_size_per_layer_input=96,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        layer_types=["full_attention", "full_attention"],
        laurel_rank=4,
        activation_sparsity_pattern=[0.0, 0.0],
        final_logit_softcapping=5.0,
    ),
    "GraniteMoeForCausalLM": lambda: transformers.GraniteMoeConfig(
        **_SIZES, logits_scaling=4.0, num_local_experts=4, num_experts_per_tok=2
    ),
    "RecurrentGemmaForCausalLM": lambda: transformers.RecurrentGemmaConfig(
        **{**_SIZES, "num_key_value_heads": 1}, lru_width=32, logits_soft_cap=5.0
    ),
}


@pytest.mark.parametrize("name", list(_MORE))
def test_other_models_of_the_table_score_as_their_plain_logits_do(name):
    torch.manual_seed(0)
    model = getattr(transformers, name)(_MORE[name]()).eval()
    batch = padded()
    with torch.no_grad():
        logits = model(**model_inputs(batch)).logits.double() / batch.temperature[..., None]
        found = trainer_logprobs(model, batch)
    expected = logits.log_softmax(-1).gather(-1, batch.target_ids.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(found.double(), expected * batch.loss_mask, atol=1e-4, rtol=0)


def test_the_table_names_classes_of_transformers():
    absent = [name for name in KNOBS if not hasattr(transformers, name)]
    assert absent == []


def test_a_cap_that_is_off_is_no_cap():
    model = cases.tiny_model("gemma2", final_logit_softcapping=None)
    sample = cases.make_samples()[0]
    batch = collate([sample], layout="padded")
    with torch.no_grad():
        found = cases.by_sample(batch, trainer_logprobs(model, batch))[0]
    torch.testing.assert_close(found, cases.true_logprobs(model, sample), atol=1e-4, rtol=0)
    assert model.config.final_logit_softcapping is None


class _SecondCap(transformers.Gemma2ForCausalLM):
    def forward(self, *args, **kwargs):
        answer = super().forward(*args, **kwargs)
        answer.logits = 30 * torch.tanh(answer.logits / 30)
        return answer


class _Capped(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        answer = super().forward(*args, **kwargs)
        answer.logits = 30 * torch.tanh(answer.logits / 30)
        return answer


class _Scaled(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        answer = super().forward(*args, **kwargs)
        answer.logits = answer.logits * 0.99
        return answer


class _ColumnsMasked(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        answer = super().forward(*args, **kwargs)
        answer.logits[:, :, [3, 4]] = torch.finfo(answer.logits.dtype).min
        return answer


class _ColumnsCut(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        answer = super().forward(*args, **kwargs)
        answer.logits = answer.logits[..., :90]
        return answer


class _HeadBypassed(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        hidden = self.model(*args, **kwargs).last_hidden_state
        return types.SimpleNamespace(logits=hidden @ self.lm_head.weight.T)


class _ClampedAbove(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        answer = super().forward(*args, **kwargs)
        answer.logits = answer.logits.clamp(max=10)
        return answer


class _CopiedCap(transformers.Gemma2ForCausalLM):
    """Caps by a number of its own, which the table's does not switch off."""

    def __init__(self, config):
        super().__init__(config)
        self.cap = config.final_logit_softcapping

    def forward(self, *args, **kwargs):
        logits = self.lm_head(self.model(*args, **kwargs).last_hidden_state)
        return types.SimpleNamespace(logits=self.cap * torch.tanh(logits / self.cap))


class _Cast(transformers.LlamaForCausalLM):
    """What FSDP's mixed precision does with an output_dtype."""

    def forward(self, *args, **kwargs):
        answer = super().forward(*args, **kwargs)
        answer.logits = answer.logits.to(torch.bfloat16)
        return answer


class _WeightsMove(transformers.LlamaForCausalLM):
    """Its head is another at every call, so that no two calls can be compared."""

    def forward(self, *args, **kwargs):
        answer = super().forward(*args, **kwargs)
        self.lm_head.weight.data = self.lm_head.weight.data.roll(1, dims=0)
        return answer


class _BeforeTheHead(transformers.LlamaForCausalLM):
    """What happens before the head is none of its business."""

    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda module, args, output: output * 0.5)


@pytest.mark.parametrize("cls", [_Capped, _Scaled, _ColumnsMasked, _ColumnsCut, _HeadBypassed])
def test_an_unknown_change_of_logits_is_refused_by_name(cls):
    model = cases.tiny_model("llama", cls=cls)
    with pytest.raises(ScoringError, match=rf"\[head-unknown\]\n  expected: from {cls.__name__}: ") as caught:
        trainer_logprobs(model, padded())
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.code) == (ScoringError, str(caught.value), "head-unknown")


def test_a_cap_is_seen_on_a_model_whose_logits_are_too_small_to_feel_it():
    # As initialised by default, logits stay below 1 and a cap of 30 changes them by less than 1e-3.
    model = cases.tiny_model("llama", cls=_Capped, initializer_range=0.02)
    ids = cases.token_ids(cases.make_samples()[0])[None]
    with torch.no_grad():
        assert model(ids).logits.abs().max() < 1
    with pytest.raises(ScoringError, match="head-unknown"):
        trainer_logprobs(model, padded())


def test_a_change_that_only_large_logits_feel_is_seen_though_there_are_none():
    # Logprobs are never above 10, and no logit of this model is: made-up logits alone can show the clamp.
    model = cases.tiny_model("llama", cls=_ClampedAbove, initializer_range=0.02)
    with pytest.raises(ScoringError, match="expected: from _ClampedAbove: logits within"):
        trainer_logprobs(model, padded())


def test_a_cap_that_stays_on_is_seen_in_low_precision():
    # At 50 it moves logprobs of -4.5 by 0.01 nats, which bfloat16 may do as well; those made up reach -64.
    model = cases.tiny_model("gemma2", cls=_CopiedCap, initializer_range=0.02, final_logit_softcapping=50.0)
    with pytest.raises(ScoringError, match="expected: from _CopiedCap: what the head gives"):
        trainer_logprobs(model.to(torch.bfloat16), padded())


def test_an_answer_cast_to_low_precision_is_refused():
    # A bfloat16 model's logits are bfloat16 anyway; its logprobs must not be.
    model = cases.tiny_model("llama", cls=_Cast).to(torch.bfloat16)
    with pytest.raises(ScoringError, match=r"logprobs in float32(.|\n)*cast to torch.bfloat16"):
        trainer_logprobs(model, padded())


def test_logprobs_that_are_not_those_of_plain_logits_are_refused():
    model = cases.tiny_model("llama", cls=_WeightsMove)
    with pytest.raises(ScoringError, match="expected: from _WeightsMove: logprobs within"):
        trainer_logprobs(model, padded())


def test_a_known_model_with_a_change_of_its_own_is_refused():
    with pytest.raises(ScoringError, match="_SecondCap"):
        trainer_logprobs(cases.tiny_model("gemma2", cls=_SecondCap), padded())


def test_a_change_before_the_head_is_no_matter():
    model = cases.tiny_model("llama", cls=_BeforeTheHead)
    sample = cases.make_samples()[0]
    batch = collate([sample], layout="padded")
    with torch.no_grad():
        found = cases.by_sample(batch, trainer_logprobs(model, batch))[0]
        logits = model(cases.token_ids(sample)[None]).logits[0].double()
    expected = torch.zeros(len(sample), dtype=torch.float64)
    expected[1:] = logits[:-1].log_softmax(-1).gather(-1, cases.token_ids(sample)[1:, None])[:, 0]
    torch.testing.assert_close(found[2:], expected[2:], atol=1e-4, rtol=0)


def test_a_number_of_the_table_that_is_no_number_is_refused():
    model = cases.tiny_model("cohere")
    model.logit_scale = "0.3"
    with pytest.raises(
        ScoringError, match=r"expected: a number at logit_scale of CohereForCausalLM\n  found:    str"
    ):
        trainer_logprobs(model, padded())


# -- heads ---------------------------------------------------------------------------------------------------


def test_tied_weights_get_the_gradient_of_both_their_uses():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(_tied(cases.CONFIGS["llama"]()))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    batch = padded()
    logits = model(**model_inputs(batch)).logits / batch.temperature[..., None]
    plain = logits.log_softmax(-1).gather(-1, batch.target_ids.clamp(min=0)[..., None])[..., 0]
    plain[batch.loss_mask].sum().backward()
    expected = model.lm_head.weight.grad.clone()
    model.zero_grad()
    trainer_logprobs(model, batch).sum().backward()
    torch.testing.assert_close(model.lm_head.weight.grad, expected, atol=1e-4, rtol=1e-4)


def test_a_head_with_bias_is_scored_with_it():
    model = cases.tiny_model("llama")
    model.lm_head = nn.Linear(32, cases.VOCAB_SIZE)
    with torch.no_grad():
        model.lm_head.bias.copy_(torch.linspace(-2, 2, cases.VOCAB_SIZE))
    sample = cases.make_samples()[0]
    batch = collate([sample], layout="padded")
    logprobs = trainer_logprobs(model, batch)
    expected = cases.true_logprobs(model, sample)
    torch.testing.assert_close(cases.by_sample(batch, logprobs.detach())[0], expected, atol=1e-4, rtol=0)
    logprobs.sum().backward()
    assert model.lm_head.bias.grad.abs().max() > 0


class _OwnLinear(nn.Linear):
    def forward(self, input):
        return super().forward(input).round()


def test_a_linear_layer_with_a_forward_of_its_own_is_refused_by_name():
    model = cases.tiny_model("llama")
    model.lm_head = _OwnLinear(32, cases.VOCAB_SIZE, bias=False)
    with pytest.raises(
        ScoringError, match=r"\[head-unusable\](.|\n)*LlamaForCausalLM\n  found:    \S*_OwnLinear\n"
    ):
        trainer_logprobs(model, padded())


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_head_that_was_cast_alone_is_refused_with_the_line_that_mends_it(layout):
    # An fp32 head, as is usual in RL: the model itself cannot run either, until hidden states are cast too.
    model = cases.tiny_model("llama").to(torch.bfloat16)
    model.lm_head.float()
    sample = cases.make_samples((13,), temperatures=(1.0,))[0]
    batch = collate([sample], layout=layout)
    with pytest.raises(ScoringError, match=r"\[head-unusable\](.|\n)*found:    torch.bfloat16") as caught:
        trainer_logprobs(model, batch)
    exec(caught.value.findings[0].fix, {"head": model.lm_head})
    with torch.no_grad():
        found = cases.by_sample(batch, trainer_logprobs(model, batch))[0]
        logits = model(cases.token_ids(sample)[None]).logits[0].double()
    assert logits.shape == (13, cases.VOCAB_SIZE)
    expected = logits[:-1].log_softmax(-1).gather(-1, cases.token_ids(sample)[1:, None])[:, 0]
    torch.testing.assert_close(found[2:], expected[1:], atol=0.1, rtol=0)


def test_a_head_of_another_dtype_is_no_matter_under_autocast():
    model = cases.tiny_model("llama").to(torch.bfloat16)
    model.lm_head.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert trainer_logprobs(model, padded()).dtype == torch.float32


def test_a_weight_of_8_bits_is_refused():
    model = cases.tiny_model("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ScoringError, match=r"\[head-unusable\](.|\n)*float8_e4m3fn"):
        trainer_logprobs(model, padded())


def test_a_model_without_a_head_is_refused_by_name():
    model = cases.tiny_model("llama").model
    with pytest.raises(ScoringError, match=r"\[head-unusable\](.|\n)*LlamaModel\n  found:    none"):
        trainer_logprobs(model, padded())


def test_a_head_that_is_overridden_already_is_refused():
    model = cases.tiny_model("llama")
    batch = padded()
    with (
        logprob_head(model, batch),
        pytest.raises(ScoringError, match="entered twice"),
        logprob_head(model, batch),
    ):
        pass
    # The outer one is left as it should be.
    assert "forward" not in vars(model.lm_head)
    model.lm_head.forward = model.lm_head.forward
    with pytest.raises(ScoringError, match=r"\[head-unusable\]"):
        trainer_logprobs(model, batch)


def test_an_empty_weight_is_said_to_be_sharded():
    model = cases.tiny_model("llama")
    batch = padded()
    trainer_logprobs(model, batch)
    # What ZeRO-3 leaves of a parameter outside its module's forward.
    model.lm_head.weight.data = torch.empty(0)
    with pytest.raises(ScoringError, match=r"\[head-sharded\](.|\n)*an empty weight of shape \[0\]"):
        trainer_logprobs(model, batch)


def test_another_input_than_the_batch_is_refused():
    model = cases.tiny_model("llama")
    batch = padded()
    with (
        logprob_head(model, batch),
        pytest.raises(ScoringError, match=r"\[head-inputs\](.|\n)*\[1, 13, 32\]"),
    ):
        model(**model_inputs(collate(cases.make_samples()[:1], layout="padded")))


def test_a_target_beyond_the_head_is_an_error_of_the_op():
    # 96 ids can be read, 90 predicted.
    model = cases.tiny_model("llama")
    model.lm_head = nn.Linear(32, 90, bias=False)
    batch = collate([cases.make_sample([1, 5, 93, 2], num_prompt=1)], layout="padded")
    with pytest.raises(TokenRangeError, match="id 93 at"):
        trainer_logprobs(model, batch)


# -- the proof is done once ----------------------------------------------------------------------------------


class _CallCounter(transformers.LlamaForCausalLM):
    num_calls = 0

    def forward(self, *args, **kwargs):
        self.num_calls += 1
        return super().forward(*args, **kwargs)


def test_one_proof_serves_a_model_until_its_head_is_another():
    model = cases.tiny_model("llama", cls=_CallCounter)
    require_known_head(model)
    assert model.num_calls == 4
    require_known_head(model)
    assert model.num_calls == 4
    first = model.lm_head
    model.lm_head = nn.Linear(32, cases.VOCAB_SIZE, bias=False)
    require_known_head(model)
    assert model.num_calls == 8
    # PEFT turns to the original and back where an adapter is switched off for a reference.
    model.lm_head = first
    require_known_head(model)
    assert model.num_calls == 8


def _halved(module, args, output):
    return output * 0.5


def _patched(model):
    plain = model.forward

    def forward(*args, **kwargs):
        answer = plain(*args, **kwargs)
        answer.logits = answer.logits * 2
        return answer

    model.forward = forward


def _halve_after(model):
    def halved(module, args, output):
        output.logits = output.logits * 0.5
        return output

    model.register_forward_hook(halved)


@pytest.mark.parametrize(
    "change", [lambda model: model.lm_head.register_forward_hook(_halved), _halve_after, _patched]
)
def test_what_changes_logits_after_the_proof_is_seen(change):
    model = cases.tiny_model("llama")
    trainer_logprobs(model, padded())
    change(model)
    for _ in range(2):
        with pytest.raises(ScoringError, match=r"\[head-unknown\]"):
            trainer_logprobs(model, padded())


def test_hooks_that_change_nothing_cost_one_more_proof_and_those_taken_away_none():
    model = cases.tiny_model("llama")
    calls = []
    batch = padded()
    trainer_logprobs(model, batch)
    handle = model.register_forward_pre_hook(lambda module, args: calls.append(1))
    # Four of the head, five of padding in front, and the batch itself.
    trainer_logprobs(model, batch)
    assert len(calls) == 10
    trainer_logprobs(model, batch)
    assert len(calls) == 11
    handle.remove()
    model.lm_head.register_forward_pre_hook(lambda module, args: calls.append(1)).remove()
    trainer_logprobs(model, batch)
    assert len(calls) == 11


def test_a_second_thread_is_told_so():
    model = cases.tiny_model("llama")
    batch = padded()
    with logprob_head(model, batch), ThreadPoolExecutor(1) as pool:
        error = pool.submit(trainer_logprobs, model, batch).exception()
    assert isinstance(error, ScoringError)
    assert error.code == "head-unusable"
    assert "two threads score one model at once" in str(error)
    assert "from one thread at a time" in str(error)
    assert trainer_logprobs(model, batch).isfinite().all()


def test_a_failed_proof_is_not_remembered_as_a_pass():
    model = cases.tiny_model("llama", cls=_Capped)
    for _ in range(2):
        with pytest.raises(ScoringError, match="head-unknown"):
            trainer_logprobs(model, padded())


def test_the_proof_does_not_keep_a_model_alive():
    model = cases.tiny_model("llama")
    trainer_logprobs(model, padded())
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
