"""Two gloo processes, sharded or replicated, against one process and plain logits, forward and gradient."""

import warnings
from datetime import timedelta

import pytest
import scoring_cases as cases
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rlbatch.collate import Padding, collate
from rlbatch.errors import ScoringError
from rlbatch.scoring import logits_for, logprob_head, trainer_logprobs

NUM_RANKS = 2
# Gemma 2's head is tied to its embedding, which only the root's group can hold; Granite's is not.
CASES = [("gemma2", ()), ("gemma2", ("layers",)), ("granite", ()), ("granite", ("layers", "head"))]


# (replicated or sharded, model, classes in a unit of their own): FSDP's older form keeps flat weights or
# flat parts of parameters.
WRAPPERS = [
    ("replicated", "gemma2", ()),
    ("replicated", "granite", ()),
    ("flat", "gemma2", ()),
    ("flat", "granite", ("layers", "head")),
    ("parts", "gemma2", ("layers",)),
    ("parts", "granite", ("layers", "head")),
]


def _batch(rank):
    """Another batch a rank; packed, so that the isolation proof runs sharded too."""
    return collate(cases.make_samples(seed=rank), layout="packed")


def _shard(model, groups):
    """The root and, each in a group of its own that is freed after its forward, the parts named."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    parts = {"layers": model.model.layers, "head": [model.lm_head]}
    for module in (module for group in groups for module in parts[group]):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)


def _wrapped(kind, name, groups):
    model = cases.tiny_model(name)
    if kind == "replicated":
        return DistributedDataParallel(model)
    classes = {"layers": type(model.model.layers[0]), "head": type(model.lm_head)}
    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        use_orig_params=kind == "parts",
        auto_wrap_policy=ModuleWrapPolicy({classes[group] for group in groups}) if groups else None,
    )


def _gradients(wrapper):
    """By the model's own names, whole."""
    if isinstance(wrapper, DistributedDataParallel):
        return {key: parameter.grad for key, parameter in wrapper.module.named_parameters()}
    if not wrapper._use_orig_params:
        return {}
    with FullyShardedDataParallel.summon_full_params(wrapper, with_grads=True):
        return {
            key.replace("_fsdp_wrapped_module.", ""): parameter.grad.clone()
            for key, parameter in wrapper.named_parameters()
        }


def _run_rank(rank, store, results):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=300),
    )
    answers = {}
    for name, groups in CASES:
        model = cases.tiny_model(name)
        _shard(model, groups)
        logprobs = trainer_logprobs(model, _batch(rank))
        logprobs.sum().backward()
        gradients = {key: parameter.grad.full_tensor() for key, parameter in model.named_parameters()}
        answers[name, groups] = (logprobs.detach(), gradients)
    for case in WRAPPERS:
        wrapper = _wrapped(*case)
        logprobs = trainer_logprobs(wrapper, _batch(rank))
        logprobs.sum().backward()
        answers[case] = (logprobs.detach(), _gradients(wrapper))
    answers["padded"] = _padding_on_one_rank(rank)
    answers["mixed"] = _mixed_precision(rank)
    answers["outside"] = _error_outside_the_forward(rank)
    answers["asking"] = _asking_of_one_rank(rank)
    torch.save(answers, results / f"{rank}.pt")
    dist.destroy_process_group()


def _mixed_precision(rank):
    """Logprobs of a model that computes in bfloat16, though its own weights and its answer are float32."""
    model = cases.tiny_model("granite")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (NUM_RANKS,)), mp_policy=policy)
    with torch.no_grad():
        return trainer_logprobs(model, _batch(rank))


def _padding_on_one_rank(rank):
    """Of the ranks only one has padding in front of a sequence; the proof takes them all."""
    model = cases.tiny_model("granite")
    _shard(model, ())
    samples = cases.make_samples(seed=rank)[: 3 - 2 * rank]
    batch = collate(samples, layout="padded", padding=Padding(side="left"))
    with torch.no_grad():
        return cases.by_sample(batch, trainer_logprobs(model, batch))


def _error_outside_the_forward(rank):
    """What the head says when it is called behind the back of the module whose hooks gather its weight."""
    model = cases.tiny_model("granite")
    _shard(model, ())
    batch = _batch(rank)
    trainer_logprobs(model, batch)
    model.reshard()
    with logprob_head(model, batch):
        try:
            model.lm_head(torch.zeros(*batch.target_ids.shape, 32))
        except ScoringError as error:
            return str(error)
    return None


def _asking_of_one_rank(rank):
    """By kind of wrapper: what `logits_for` says, or the logits that rank 0 alone asks it for."""
    sharded = cases.tiny_model("granite")
    _shard(sharded, ("layers", "head"))
    gathered = cases.tiny_model("granite")
    _shard(gathered, ())
    with torch.no_grad():
        trainer_logprobs(gathered, _batch(rank))
    own = cases.tiny_model("granite")
    fully_shard(own, mesh=DeviceMesh("cpu", [rank]))
    models = {
        "sharded": sharded,
        # One trainer beside other processes: all of it lies here.
        "own": own,
        # The weights of the root stay whole after a forward pass, until they are stepped.
        "gathered": gathered,
        "flat": _wrapped("flat", "granite", ()),
        "parts": _wrapped("parts", "granite", ("layers", "head")),
        "replicated": _wrapped("replicated", "granite", ()),
    }
    said = {}
    for kind, model in models.items():
        try:
            ask = logits_for(model)
        except ScoringError as error:
            said[kind] = str(error)
        else:
            segment = _batch(rank).host_segments[0]
            said[kind] = ask(_batch(rank), 0, segment.start, segment.stop) if rank == 0 else None
    return said


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each rank computed."""
    folder = tmp_path_factory.mktemp("sharded")
    multiprocessing.spawn(_run_rank, args=(folder / "store", folder), nprocs=NUM_RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(NUM_RANKS)]


def _plain(model, rank):
    """[1, T] logprobs of the rank's batch, 0 untrained, from plain logits of a whole model."""
    rows = []
    for sample in cases.make_samples(seed=rank):
        ids = cases.token_ids(sample)
        temperature = torch.tensor(sample.temperature.tolist())
        logits = model(ids[None]).logits[0, :-1] / temperature[1:, None]
        logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        rows += [logprobs * torch.tensor(sample.loss_mask.tolist())[1:], torch.zeros(1)]
    return torch.cat(rows)[None]


@pytest.mark.parametrize(("name", "groups"), CASES)
def test_sharded_head_equals_one_process(name, groups, answers):
    model = cases.tiny_model(name)
    expected = [_plain(model, rank) for rank in range(NUM_RANKS)]
    # fully_shard averages gradients over the ranks.
    (sum(logprobs.sum() for logprobs in expected) / NUM_RANKS).backward()
    for rank, answer in enumerate(answers):
        logprobs, gradients = answer[name, groups]
        torch.testing.assert_close(logprobs, expected[rank].detach(), atol=1e-5, rtol=0)
        for key, parameter in model.named_parameters():
            size = max(1.0, float(parameter.grad.abs().max()))
            torch.testing.assert_close(gradients[key], parameter.grad, atol=1e-5 * size, rtol=0)


@pytest.mark.parametrize("case", WRAPPERS)
def test_a_wrapped_model_equals_one_process(case, answers):
    kind, name, _ = case
    model = cases.tiny_model(name)
    expected = [_plain(model, rank) for rank in range(NUM_RANKS)]
    (sum(logprobs.sum() for logprobs in expected) / NUM_RANKS).backward()
    for rank, answer in enumerate(answers):
        logprobs, gradients = answer[case]
        torch.testing.assert_close(logprobs, expected[rank].detach(), atol=1e-5, rtol=0)
        # Flat weights have flat gradients, of no names.
        assert set(gradients) == (set() if kind == "flat" else {key for key, _ in model.named_parameters()})
        for key, gradient in gradients.items():
            own = model.get_parameter(key).grad
            torch.testing.assert_close(gradient, own, atol=1e-5 * max(1.0, float(own.abs().max())), rtol=0)


def test_ranks_with_and_without_padding_in_front_do_not_wait_for_each_other(answers):
    model = cases.tiny_model("granite")
    for rank, answer in enumerate(answers):
        samples = cases.make_samples(seed=rank)[: len(answer["padded"])]
        for sample, found in zip(samples, answer["padded"], strict=True):
            torch.testing.assert_close(found, cases.true_logprobs(model, sample), atol=1e-4, rtol=0)
    assert [len(answer["padded"]) for answer in answers] == [3, 1]


def test_mixed_precision_is_allowed_for_as_the_rounding_it_is(answers):
    model = cases.tiny_model("granite")
    for rank, answer in enumerate(answers):
        apart = (answer["mixed"] - _plain(model, rank)).abs().max()
        # More than float32 would do, so it was bfloat16 indeed.
        assert 1e-4 < apart < 0.2


def test_a_head_called_outside_its_models_forward_is_refused(answers):
    for answer in answers:
        assert "[head-sharded]" in answer["outside"]
        assert f"a {DTensor.__name__} with placements (Shard(dim=0),)" in answer["outside"]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("sharded", "fully_shard on the model"),
        ("gathered", "fully_shard on the model"),
        ("flat", "FullyShardedDataParallel on the model"),
        ("parts", "FullyShardedDataParallel on the model"),
    ],
)
def test_one_rank_cannot_ask_a_sharded_model_for_logits(kind, found, answers):
    for answer in answers:
        assert answer["asking"][kind].startswith("[model-sharded]")
        assert found in answer["asking"][kind]
        assert "without logits_for" in answer["asking"][kind]


@pytest.mark.parametrize("kind", ["replicated", "own"])
def test_one_rank_can_ask_a_model_that_is_whole_on_it_while_the_other_does_not(kind, answers):
    model = cases.tiny_model("granite")
    segment = _batch(0).host_segments[0]
    with torch.no_grad():
        alone = model(cases.token_ids(cases.make_samples(seed=0)[0])[None]).logits[0]
    found = answers[0]["asking"][kind]
    torch.testing.assert_close(found, alone[segment.start : segment.stop], atol=1e-5, rtol=0)
    assert answers[1]["asking"][kind] is None


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_model_sharded_over_one_rank_can_be_asked():
    model = cases.tiny_model("granite")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    batch = _batch(0)
    segment = batch.host_segments[0]
    found = logits_for(model)(batch, 0, segment.start, segment.stop)
    with torch.no_grad():
        alone = cases.tiny_model("granite")(cases.token_ids(cases.make_samples(seed=0)[0])[None]).logits[0]
    torch.testing.assert_close(found, alone[segment.start : segment.stop], atol=1e-5, rtol=0)
