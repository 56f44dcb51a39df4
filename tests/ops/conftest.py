"""Every test of an op runs on each backend that can be had here."""

import pytest

from rlbatch_kernels import backends


@pytest.fixture(params=[backend.name for backend in backends.BACKENDS])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a backend, which `auto` chooses within the test wherever it fits the arguments."""
    name: str = request.param
    kept = tuple(known for known in backends.BACKENDS if known.name in (name, "torch"))
    if (reason := kept[0].missing()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(backends, "BACKENDS", kept)
    return name
