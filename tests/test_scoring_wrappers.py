"""Models in wrappers: the wrapper is what is called, the model inside is what is looked into."""

import pytest
import scoring_cases as cases
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from rlbatch.collate import collate
from rlbatch.errors import ScoringError
from rlbatch.scoring import (
    logits_for,
    model_inputs,
    model_vocab_size,
    require_packing_isolated,
    trainer_logprobs,
)
from rlbatch.scoring.wrappers import called_alone, model_name, unwrapped


class _Adapter(nn.Module):
    """As PEFT wraps: the model a level below, found by a method; unknown attributes are the model's."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model["model"], name)

    def get_base_model(self):
        return self.base_model["model"]

    def forward(self, **inputs):
        return self.base_model["model"](**inputs)


class _Reducer(nn.Module):
    """As DistributedDataParallel wraps: one child, and nothing else of the model."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, **inputs):
        return self.module(**inputs)


class _Replica(DistributedDataParallel):
    """DistributedDataParallel as far as it goes without other ranks."""

    def __init__(self, model):
        nn.Module.__init__(self)
        self.module = model

    def forward(self, **inputs):
        pytest.fail("it would wait for the other ranks")


class _Copies(nn.Module):
    """As PEFT's modules_to_save: a copy for an adapter, and the original for when it is switched off."""

    def __init__(self, original, copy):
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({"default": copy})
        self.active_adapters = ["default"]
        self.disable_adapters = False

    @property
    def weight(self):
        return self.modules_to_save["default"].weight

    def forward(self, hidden):
        chosen = self.original_module if self.disable_adapters else self.modules_to_save["default"]
        return chosen(hidden)


class _LowRank(nn.Module):
    """As PEFT's adapter of a linear layer, whose name is Linear too."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, hidden):
        return self.base_layer(hidden) + hidden.sum(-1, keepdim=True)


class _Bypass(_Reducer):
    """A wrapper that changes what the model inside gives."""

    def forward(self, **inputs):
        answer = super().forward(**inputs)
        answer.logits = answer.logits * 1.01
        return answer


def _check(called, model, layout):
    """Logprobs of what is called against the float64 truth of the model."""
    samples = cases.make_samples()
    batch = collate(samples, layout=layout)
    with torch.no_grad():
        logprobs = trainer_logprobs(called, batch)
    for sample, found in zip(samples, cases.by_sample(batch, logprobs), strict=True):
        torch.testing.assert_close(found, cases.true_logprobs(model, sample), atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("wrap", [_Adapter, _Reducer, lambda model: _Reducer(_Adapter(model))])
@pytest.mark.parametrize("name", list(cases.CONFIGS))
def test_a_wrapped_model_scores_as_the_model(name, wrap, layout):
    model = cases.tiny_model(name)
    _check(wrap(model), model, layout)


def test_the_wrapper_is_called_and_gets_the_gradient():
    model = cases.tiny_model("llama")
    wrapper = _Reducer(model)
    called = []
    wrapper.register_forward_hook(lambda module, args, output: called.append(module))
    trainer_logprobs(wrapper, collate(cases.make_samples(), layout="packed")).sum().backward()
    # Four forwards for the head, seven for packing, and the batch's own.
    assert called == [wrapper] * 12
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_is_known_of_a_model_is_that_of_the_one_inside():
    model = cases.tiny_model("gemma2")
    for wrapper in (_Reducer(model), _Adapter(model), _Reducer(_Adapter(model))):
        assert unwrapped(wrapper) is model
        assert model_name(wrapper) == "Gemma2ForCausalLM"
        assert model_vocab_size(wrapper) == cases.VOCAB_SIZE
        require_packing_isolated(wrapper)
    assert unwrapped(model) is model


def test_a_wrapper_that_changes_logits_is_refused():
    with pytest.raises(ScoringError, match=r"\[head-unknown\]"):
        trainer_logprobs(_Bypass(cases.tiny_model("llama")), collate(cases.make_samples(), layout="padded"))


def test_a_module_that_wraps_no_transformers_model_is_refused_by_name():
    with pytest.raises(ScoringError, match=r"\[head-unusable\](.|\n)*input embedding(.|\n)*, in Identity\n"):
        trainer_logprobs(_Reducer(nn.Identity()), collate(cases.make_samples(), layout="padded"))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_copy_of_a_head_that_is_in_use_is_the_head(layout):
    model = cases.tiny_model("gemma2")
    original = model.lm_head
    copy = nn.Linear(32, cases.VOCAB_SIZE, bias=False)
    with torch.no_grad():
        copy.weight.copy_(original.weight * 1.5)
    model.lm_head = _Copies(original, copy)
    _check(_Adapter(model), model, layout)
    # A reference is scored with the adapter switched off: another head, proven for itself.
    model.lm_head.disable_adapters = True
    _check(_Adapter(model), cases.tiny_model("gemma2"), layout)


def test_an_adapted_head_is_told_from_a_linear_one():
    model = cases.tiny_model("llama")
    model.lm_head = _LowRank(model.lm_head)
    with pytest.raises(ScoringError, match=r"\[head-unusable\](.|\n)*\._LowRank\n(.|\n)*target_modules"):
        trainer_logprobs(_Adapter(model), collate(cases.make_samples(), layout="padded"))


def test_suspects_are_asked_of_the_model_inside():
    # A rank may have the only suspect, and DistributedDataParallel would wait for the others.
    model = cases.tiny_model("gemma2")
    wrapper = _Replica(model)
    batch = collate(cases.make_samples(), layout="packed")
    segment = batch.host_segments[0]
    found = logits_for(wrapper)(batch, 0, segment.start, segment.stop)
    torch.testing.assert_close(found, logits_for(model)(batch, 0, segment.start, segment.stop))


def test_what_an_adapter_does_to_the_inputs_is_in_the_logits_of_suspects():
    class Prefixed(_Adapter):
        """As PEFT's prefixes: what is in front of the tokens is known to the wrapper alone."""

        def forward(self, *, input_ids, **inputs):
            return super().forward(input_ids=(input_ids + 1) % cases.VOCAB_SIZE, **inputs)

    model = Prefixed(cases.tiny_model("gemma2"))
    batch = collate(cases.make_samples(), layout="padded")
    segment = batch.host_segments[0]
    with torch.no_grad():
        expected = model(**model_inputs(batch)).logits[0, segment.start : segment.stop]
    found = logits_for(_Replica(model))(batch, 0, segment.start, segment.stop)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_wrapper_that_may_compute_something_is_called_alone_as_it_is():
    model = nn.Linear(2, 2)
    for wrap in (_Bypass, _Reducer, _Adapter):
        wrapper = wrap(model)
        assert called_alone(wrapper) is wrapper
        assert called_alone(_Replica(wrapper)) is wrapper
        assert called_alone(_Replica(torch.compile(wrapper, backend="eager"))) is wrapper
    sharded = nn.Module()
    sharded.add_module("_fsdp_wrapped_module", model)
    assert called_alone(sharded) is sharded


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_a_compiled_model_scores_every_batch_by_its_own_targets(name):
    model = cases.tiny_model(name)
    compiled = torch.compile(model, backend="eager")
    _check(compiled, model, "packed")
    num_graphs = counters["stats"]["unique_graphs"]
    batch = collate(cases.make_samples(seed=1), layout="packed")
    with torch.no_grad():
        found = cases.by_sample(batch, trainer_logprobs(compiled, batch))
    for sample, own in zip(cases.make_samples(seed=1), found, strict=True):
        torch.testing.assert_close(own, cases.true_logprobs(model, sample), atol=1e-4, rtol=0)
    assert counters["stats"]["unique_graphs"] == num_graphs > 0, "compiled anew for a batch of the same shape"
