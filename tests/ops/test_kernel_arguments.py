"""What the ops refuse: each error names the argument, what was found and what was expected."""

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rlbatch_kernels
from rlbatch_kernels import (
    DtypeError,
    ScaleError,
    ShapeError,
    TokenRangeError,
    alignment_stats,
    linear_logprobs,
    policy_ratio,
    token_logprobs,
)


def call_token(**changes: Any) -> Tensor:
    arguments: dict[str, Any] = {
        "logits": torch.zeros(2, 3, 5),
        "target_ids": torch.zeros(2, 3, dtype=torch.int64),
        "temperature": torch.ones(2, 3),
        "mask": torch.ones(2, 3, dtype=torch.bool),
    }
    return token_logprobs(**(arguments | changes))


def call_linear(**changes: Any) -> Tensor:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(2, 3, 4),
        "weight": torch.zeros(5, 4),
        "target_ids": torch.zeros(2, 3, dtype=torch.int64),
        "temperature": 1.0,
        "mask": torch.ones(2, 3, dtype=torch.bool),
        "bias": torch.zeros(5),
    }
    return linear_logprobs(**(arguments | changes))


def call_ratio(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "trainer_logprobs": torch.zeros(2, 3),
        "inference_logprobs": torch.zeros(2, 3),
        "loss_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    return policy_ratio(**(arguments | changes))


def call_stats(**changes: Any) -> Tensor:
    arguments: dict[str, Any] = {
        "trainer_logprobs": torch.zeros(2, 3),
        "inference_logprobs": torch.zeros(2, 3),
        "mask": torch.ones(2, 3, dtype=torch.bool),
        "segments": torch.tensor([[0, 0, 3, 0]], dtype=torch.int32),
    }
    return alignment_stats(**(arguments | changes))


def freed(*shape: int) -> Tensor:
    """As FSDP leaves a parameter between its module's calls: the shape is there, the storage is not."""
    tensor = torch.zeros(*shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_the_arguments_that_the_cases_change_are_right() -> None:
    call_token()
    call_linear()
    call_ratio()
    call_stats()


# (call, argument, value, error, what the text must say beside the argument's name)
SHAPES = [
    (call_token, "logits", torch.zeros(2, 3, 0), "found shape [2, 3, 0], expected [..., V]"),
    (call_token, "logits", torch.tensor(0.0), "found shape [], expected [..., V]"),
    (call_token, "logits", freed(2, 3, 5), "found shape [2, 3, 5] over a freed storage"),
    (call_token, "target_ids", torch.zeros(2, 4, dtype=torch.int64), "found shape [2, 4], expected [2, 3]"),
    (call_token, "mask", torch.ones(3, dtype=torch.bool), "found shape [3], expected [2, 3]"),
    (call_token, "temperature", torch.ones(2, 1), "found shape [2, 1], expected [2, 3]"),
    (call_token, "temperature", torch.tensor(1.0), "found shape [], expected [2, 3]"),
    (call_linear, "hidden", torch.zeros(2, 3, 6), "found shape [2, 3, 6], expected [..., 4]"),
    (call_linear, "hidden", torch.tensor(0.0), "found shape [], expected [..., 4]"),
    (call_linear, "weight", torch.zeros(0), "found shape [0], expected [V, D] with data"),
    (call_linear, "weight", torch.zeros(0, 4), "found shape [0, 4], expected [V, D] with data"),
    (call_linear, "weight", torch.zeros(20), "found shape [20], expected [V, D]"),
    (call_linear, "weight", freed(5, 4), "over a freed storage of 0 bytes (a sharded parameter"),
    (call_linear, "bias", torch.zeros(4), "found shape [4], expected [5]"),
    (call_linear, "target_ids", torch.zeros(6, dtype=torch.int64), "found shape [6], expected [2, 3]"),
    (call_ratio, "inference_logprobs", torch.zeros(2, 2), "found shape [2, 2], expected [2, 3]"),
    (call_ratio, "loss_mask", torch.ones(6, dtype=torch.bool), "found shape [6], expected [2, 3]"),
    (call_stats, "inference_logprobs", torch.zeros(3, 2), "found shape [3, 2], expected [2, 3]"),
    (call_stats, "mask", torch.ones(2, dtype=torch.bool), "found shape [2], expected [2, 3]"),
    (call_stats, "segments", torch.zeros(2, 3, dtype=torch.int32), "found shape [2, 3], expected [G, 4]"),
]

DTYPES = [
    (
        call_token,
        "logits",
        torch.zeros(2, 3, 5, dtype=torch.int64),
        "found torch.int64, expected one of float16",
    ),
    (call_token, "logits", [[0.0]], "found list, expected a torch.Tensor"),
    (call_token, "logits", torch.zeros(2, 3, 5, device="meta"), "found a meta tensor"),
    (call_token, "logits", torch.zeros(2, 3, 5).to_sparse(), "found layout torch.sparse_coo"),
    (call_token, "target_ids", torch.zeros(2, 3), "found torch.float32, expected one of uint8"),
    (call_token, "target_ids", torch.zeros(2, 3, dtype=torch.bool), "found torch.bool"),
    (call_token, "mask", torch.ones(2, 3), "found torch.float32, expected one of bool"),
    (call_token, "mask", None, "found NoneType, expected a torch.Tensor"),
    (
        call_token,
        "temperature",
        torch.ones(2, 3, dtype=torch.bool),
        "found torch.bool, expected one of float16",
    ),
    (call_token, "temperature", torch.ones(2, 3).requires_grad_(), "requires grad"),
    (call_token, "temperature", True, "found bool True, expected a float"),
    (call_token, "temperature", "1.0", "found str '1.0', expected a float"),
    (call_token, "temperature", None, "found NoneType None, expected a float"),
    (call_linear, "weight", torch.zeros(5, 4, device="meta"), "found a meta tensor"),
    (
        call_linear,
        "weight",
        torch.zeros(5, 4, dtype=torch.float64),
        "found torch.float64 with hidden in torch.f",
    ),
    (
        call_linear,
        "bias",
        torch.zeros(5, dtype=torch.float64),
        "found torch.float64 with hidden in torch.float",
    ),
    (call_linear, "logit_scale", True, "found bool True, expected a float"),
    (call_linear, "soft_cap", torch.tensor(30.0), "found Tensor tensor(30.), expected a float"),
    (
        call_ratio,
        "trainer_logprobs",
        torch.zeros(2, 3).bfloat16(),
        "found torch.bfloat16, expected one of float32",
    ),
    (
        call_ratio,
        "inference_logprobs",
        torch.zeros(2, 3).half(),
        "found torch.float16, expected one of float32",
    ),
    (call_ratio, "loss_mask", torch.ones(2, 3), "found torch.float32, expected one of bool"),
    (call_stats, "trainer_logprobs", torch.zeros(2, 3).bfloat16(), "found torch.bfloat16"),
    (call_stats, "mask", torch.ones(2, 3, dtype=torch.int64), "found torch.int64, expected one of bool"),
    (call_stats, "segments", torch.zeros(1, 4), "found torch.float32, expected one of int32, int64"),
]

BAD_NUMBERS = [0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-50, 1e-39, 1e50, 0]

SCALES = [
    (call, name, value, f"found {value!r}, expected a finite number above 0")
    for call, name in ((call_token, "temperature"), (call_linear, "logit_scale"), (call_linear, "soft_cap"))
    for value in BAD_NUMBERS
]


def _cases() -> list[Any]:
    params = []
    for error, cases in ((ShapeError, SHAPES), (DtypeError, DTYPES), (ScaleError, SCALES)):
        for call, argument, value, text in cases:
            label = f"{call.__name__}-{argument}-{text[:40]}"
            params.append(pytest.param(call, argument, value, error, text, id=label))
    return params


@pytest.mark.parametrize(("call", "argument", "value", "error", "text"), _cases())
def test_a_bad_argument_is_refused_by_name(
    call: Callable[..., object], argument: str, value: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as raised:
        call(**{argument: value})
    assert str(raised.value).startswith(f"{argument}: ")
    assert text in str(raised.value)


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf"), 1e-50, 1e-39])
def test_a_bad_temperature_is_named_with_its_position_where_trained_only(value: float) -> None:
    temperature = torch.ones(2, 3, dtype=torch.float64)
    temperature[1, 2] = value
    with pytest.raises(ScaleError) as raised:
        call_token(temperature=temperature)
    assert f"temperature {value} at (1, 2)" in str(raised.value)
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[1, 2] = False
    assert call_token(temperature=temperature, mask=mask).isfinite().all()


def test_a_mask_and_a_temperature_must_be_given() -> None:
    logits, ids = torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(TypeError, match="temperature"):
        token_logprobs(logits, ids, mask=torch.ones(1, dtype=torch.bool))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="mask"):
        token_logprobs(logits, ids, temperature=1.0)  # type: ignore[call-arg]


def test_a_fake_tensor_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        weight = torch.zeros(5, 4)
    with pytest.raises(DtypeError, match="weight: found a fake tensor"):
        call_linear(weight=weight)


@pytest.mark.usefixtures("backend")
def test_the_least_temperature_gives_the_logprob_of_a_certain_token() -> None:
    logits = torch.tensor([[[0.0, 1.0, -1.0, 0.5, 0.25]]])
    least = 1.2e-38
    found = token_logprobs(
        logits, torch.tensor([[1]]), temperature=least, mask=torch.ones(1, 1, dtype=torch.bool)
    )
    assert found.item() == 0


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_tensors_of_function_transforms_are_refused(transform: str) -> None:
    def call(logits: Tensor) -> Tensor:
        return call_token(logits=logits).sum()

    transformed = torch.vmap(call) if transform == "vmap" else torch.func.grad(call)
    shape = (4, 2, 3, 5) if transform == "vmap" else (2, 3, 5)
    with pytest.raises(DtypeError, match=r"logits: found a tensor of torch\.func or torch\.vmap"):
        transformed(torch.zeros(shape))


COMPILED: list[Callable[[Tensor], Tensor]] = [
    lambda x: call_token(logits=x).sum(),
    lambda x: call_linear(hidden=x[..., :4]).sum(),
    lambda x: call_ratio(trainer_logprobs=x[..., 0]).ratio.sum(),
    lambda x: call_stats(trainer_logprobs=x[..., 0]).sum(),
]


@pytest.mark.parametrize("call", COMPILED, ids=["token", "linear", "ratio", "stats"])
def test_a_compiled_caller_gets_the_same_and_no_warning(call: Callable[[Tensor], Tensor]) -> None:
    # Warnings are errors in this project's tests.
    torch._dynamo.reset()
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(call, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(logits), call(logits))


@pytest.fixture
def _one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process_group")
def test_a_sharded_weight_is_refused_and_its_full_tensor_taken() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = distribute_tensor(torch.zeros(5, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(DtypeError, match="weight: found a DTensor, which may be sharded, expected a plain"):
        call_linear(weight=weight)
    call_linear(weight=weight.full_tensor())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize(
    ("call", "argument", "value"),
    [
        (call_token, "target_ids", torch.zeros(2, 3, dtype=torch.int64)),
        (call_token, "mask", torch.ones(2, 3, dtype=torch.bool)),
        (call_linear, "weight", torch.zeros(5, 4)),
        (call_ratio, "inference_logprobs", torch.zeros(2, 3)),
        (call_stats, "segments", torch.zeros(1, 4, dtype=torch.int32)),
    ],
)
def test_arguments_on_two_devices_are_refused(
    call: Callable[..., object], argument: str, value: Tensor
) -> None:
    with pytest.raises(DtypeError, match=f"{argument}: found device cuda:0, expected cpu"):
        call(**{argument: value.cuda()})


@pytest.mark.parametrize("error", [DtypeError, ScaleError, ShapeError, TokenRangeError])
def test_errors_pickle(error: type[Exception]) -> None:
    copy = pickle.loads(pickle.dumps(error("mask: found a, expected b")))
    assert type(copy) is error
    assert str(copy) == "mask: found a, expected b"


def test_exports_are_sorted_and_exist() -> None:
    assert list(rlbatch_kernels.__all__) == sorted(rlbatch_kernels.__all__)
    assert all(hasattr(rlbatch_kernels, name) for name in rlbatch_kernels.__all__)
