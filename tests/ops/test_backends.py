"""Which backend serves: by name, by itself, and what is said where one is missing."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlbatch_kernels import (
    BackendError,
    BackendWarning,
    alignment_stats,
    backends,
    c_library,
    last_backend,
    linear_logprobs,
    token_logprobs,
    token_statistics,
)

needs_c = pytest.mark.skipif(c_library.missing() is not None, reason="the C library was not built")


def token(dtype: torch.dtype = torch.float32, **options: object) -> Tensor:
    mask = torch.ones(2, dtype=torch.bool)
    logits = torch.zeros(2, 4, dtype=dtype)
    return token_logprobs(logits, torch.tensor([0, 3]), temperature=1.0, mask=mask, **options)  # type: ignore[arg-type]


def stats(dtype: torch.dtype = torch.float32, **options: object) -> Tensor:
    zeros, segments = torch.zeros(1, 2, dtype=dtype), torch.tensor([[0, 0, 2, 0]])
    return alignment_stats(zeros, zeros, zeros == 0, segments, **options)  # type: ignore[arg-type]


@pytest.fixture
def _without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(backends.BACKENDS[0], missing=lambda: "no compiler was found")
    monkeypatch.setattr(backends, "BACKENDS", (absent, *backends.BACKENDS[1:]))
    monkeypatch.setattr(backends, "_warned", set())


@needs_c
def test_the_c_kernels_serve_every_op_on_the_cpu_and_torch_serves_float64() -> None:
    for call, op in ((token, "token_logprobs"), (stats, "alignment_stats")):
        for dtype, name in ((torch.float32, "c"), (torch.float64, "torch")):
            call(dtype)
            assert last_backend(op) == name
    hidden, ids, mask = torch.zeros(1, 3), torch.tensor([1]), torch.tensor([True])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pair = hidden.to(dtype), torch.ones(4, 3, dtype=dtype)
        linear_logprobs(*pair, ids, temperature=1.0, mask=mask)
        assert last_backend("linear_logprobs") == "c"
    token_statistics(hidden, ids, temperature=1.0, mask=mask, backend="torch")
    assert last_backend("token_statistics") == "torch"


def test_an_op_that_was_never_called_has_no_backend() -> None:
    assert last_backend("no such op") is None


@pytest.mark.parametrize("call", [token, stats])
def test_a_backend_is_taken_by_name(call) -> None:
    expected = call(backend="torch")
    if c_library.missing() is None:
        torch.testing.assert_close(call(backend="c"), expected)


@needs_c
@pytest.mark.parametrize("call", [token, stats])
def test_a_backend_that_does_not_take_the_arguments_is_an_error(call) -> None:
    with pytest.raises(BackendError, match=r"'c', which cannot serve this .*: it takes float32.*is float64"):
        call(torch.float64, backend="c")


def test_an_unknown_backend_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(
        BackendError, match="backend: found 'cuda', expected one of 'auto', 'c', 'triton', 'torch'"
    ):
        token(backend="cuda")


@pytest.mark.usefixtures("_without_c")
def test_a_missing_backend_is_said_once_and_torch_serves() -> None:
    with pytest.warns(BackendWarning, match="from backend 'c' to 'torch': no compiler was found") as seen:
        token()
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        token()
        stats()
    assert last_backend("token_logprobs") == last_backend("alignment_stats") == "torch"


@pytest.mark.usefixtures("_without_c")
def test_where_warnings_are_errors_the_second_call_is_served() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BackendWarning):
            token()
        token()


@pytest.mark.usefixtures("_without_c")
def test_a_missing_backend_asked_for_by_name_is_an_error() -> None:
    with pytest.raises(BackendError, match=r"'c', which cannot serve this token_logprobs: no compiler"):
        token(backend="c")


def test_a_library_that_was_not_built_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_library, "EXTENSION_SUFFIXES", [".none"])
    with pytest.raises(c_library.LibraryMissingError, match=r"not built .*gcc or clang.*--no-cache-dir"):
        c_library.functions.__wrapped__()


@needs_c
def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_library, "INTERFACE", c_library.INTERFACE + 1)
    with pytest.raises(c_library.LibraryMissingError, match="built from other sources"):
        c_library.functions.__wrapped__()


@needs_c
def test_threads_follow_torch_and_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert [c_library.num_threads(count) for count in (0, 10, 2**17, 2**30)] == [1, 1, 2, 4]
