"""The Triton backend from outside: when it is imported, what refuses it, and its tests on the interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlbatch_kernels import BackendError, token_logprobs, triton_library

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(triton_library.missing() is not None, reason=str(triton_library.missing()))


def test_importing_the_package_and_running_on_the_cpu_imports_no_triton() -> None:
    code = """
import sys, torch, rlbatch_kernels
rlbatch_kernels.token_logprobs(
    torch.zeros(1, 2), torch.tensor([0]), temperature=1.0, mask=torch.tensor([True])
)
sys.exit(int("triton" in sys.modules or "rlbatch_kernels.triton_jit" in sys.modules))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.parametrize("error", [RuntimeError("Failed to find C compiler"), None])
def test_triton_that_cannot_run_is_missing_with_the_reason(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_library, "try_launch", launch)
    reason = "a kernel of one store does not run: RuntimeError: Failed to find C compiler"
    assert triton_library.missing.__wrapped__() == (reason if error else None)


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter runs on the CPU")
def test_cpu_tensors_are_refused_with_the_reason() -> None:
    reason = "not installed" if triton_library.missing() else "it runs on cuda, and the arguments are on cpu"
    with pytest.raises(BackendError, match=reason):
        token_logprobs(
            torch.zeros(1, 2),
            torch.tensor([0]),
            temperature=1.0,
            mask=torch.tensor([True]),
            backend="triton",
        )


# Those that start a process of their own, which says nothing of kernels and is slow in an interpreter.
NOT_INTERPRETED = ("threads_change_no_bit", "peak_memory", "need_little_beyond", "imports_no_triton")


# About a minute: everything that is asked of the ops, again, by an interpreter in numpy.
@pytest.mark.slow
@needs_triton
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this is the interpreter")
def test_every_test_of_the_ops_passes_on_the_interpreter() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-q",
            "-k",
            " and not ".join(("triton", "cuda", *NOT_INTERPRETED)),
            "-p",
            "no:cacheprovider",
            HERE,
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
