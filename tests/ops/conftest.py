"""Every test of an op runs on each backend that can be had here."""

import os

import pytest

from rlbatch_kernels import backends

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    import interpreter

    interpreter.install()


@pytest.fixture(params=[backend.name for backend in backends.BACKENDS])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a backend, which `auto` chooses within the test wherever it fits the arguments."""
    name: str = request.param
    kept = tuple(known for known in backends.BACKENDS if known.name in (name, "torch"))
    if (reason := kept[0].missing()) is not None:
        pytest.skip(reason)
    device = request.getfixturevalue("device").type if "device" in request.fixturenames else "cpu"
    if kept[0].device_type not in (None, device):
        pytest.skip(f"backend {name} runs on {kept[0].device_type}")
    monkeypatch.setattr(backends, "BACKENDS", kept)
    if INTERPRETED:
        interpreter.start_test()
    return name
