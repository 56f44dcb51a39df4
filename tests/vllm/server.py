"""A vLLM server on loopback for the tests of this folder, and plain HTTP to it."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

START_SECONDS = 300
REPLY_SECONDS = 300
PIECE_BYTES = 777
"""Streams are handed on in pieces of at most this size, which fit no event."""

ARGUMENTS = (
    *("--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager", "--seed", "0"),
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Mounts /pause and /resume.
    "VLLM_SERVER_DEV_MODE": "1",
}


@dataclass(frozen=True)
class Server:
    """One that answers."""

    url: str

    def post(self, route: str, body: Mapping[str, object] | None = None) -> Iterator[bytes]:
        """The body of the answer, in pieces; an error's body as well."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(
            self.url + route, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            reply = urllib.request.urlopen(request, timeout=REPLY_SECONDS)
        except urllib.error.HTTPError as error:
            reply = error
        with reply:
            while piece := reply.read(PIECE_BYTES):
                yield piece


@contextmanager
def serving(
    python: str,
    model: Path,
    log: Path,
    *,
    arguments: Sequence[str] = ARGUMENTS,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Server]:
    """A server for as long as the block runs; what it printed is in `log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *arguments]
    command += ["--served-model-name", "tinylm", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        # A group of its own: the engine has child processes, which must go with it.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **environment},
            start_new_session=True,
        )
    try:
        server = Server(f"http://127.0.0.1:{port}")
        _wait(server, process, log)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(server.url + "/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server did not become healthy:\n{log.read_text(errors='replace')[-4000:]}")
