"""Make `examples/rollouts` and the data of `rlbatch demo` from rollouts that a real vLLM server sampled.

    python examples/make_rollouts.py

The recordings lie with the tests. Their server ran in float32, with the logprobs mode that is in each name:
that the author of this script knows, no reader guesses it.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from rlbatch.audit import Scorer, load_scorer
from rlbatch.collate import collate, with_logprobs
from rlbatch.records import LogprobsMode, Sample
from rlbatch.storage import open_writer, write_shard
from rlbatch.storage.recordings import read_recording
from rlbatch.storage.statements import Statement

ROOT = Path(__file__).parent.parent
RECORDINGS = ROOT / "tests" / "data" / "vllm-0.32.0" / "rollouts"

SHARDS: tuple[tuple[str, LogprobsMode], ...] = (
    ("fp32_raw__t1", "raw"),
    ("fp32_processed__t07", "processed"),
    ("fp32_processed__t13", "processed"),
    ("fp32_raw__long400", "raw"),
)
"""A shard each: temperatures 1, 0.7 and 1.3, and six completions of 400 tokens. All can be trained on."""
DEMO: tuple[tuple[str, int], ...] = (("fp32_raw__t1", 29), ("fp32_raw__long400", 3))
"""Rows of two raw recordings: short ones, and long ones in which a fault can begin half-way."""


def main() -> None:
    """Score, convert, write; existing files are never replaced."""
    parser = argparse.ArgumentParser(description="Make examples/rollouts and the data of `rlbatch demo`.")
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "tinylm")
    parser.add_argument("--out", type=Path, default=ROOT / "examples" / "rollouts")
    parser.add_argument("--demo", type=Path, default=ROOT / "rlbatch" / "data" / "demo.safetensors")
    arguments = parser.parse_args()
    scorer = load_scorer(arguments.model, device="cpu", dtype=torch.float32)
    with open_writer(arguments.out) as writer:
        for name, mode in SHARDS:
            for sample in recorded(name, mode, scorer):
                writer.append(sample)
            writer.flush()
    rows = [row for name, count in DEMO for row in list(recorded(name, "raw", scorer))[:count]]
    write_shard(arguments.demo, [with_trainer(sample, scorer) for sample in rows])
    print(f"wrote {len(writer.paths)} shards to {arguments.out}, and {arguments.demo}")


def recorded(name: str, mode: LogprobsMode, scorer: Scorer) -> Iterator[Sample]:
    """The samples of one recording, with the model that sampled them in their provenance."""
    statement = Statement(engine="vllm", engine_version="0.32.0", logprobs_mode=mode)
    for row in read_recording(RECORDINGS / f"{name}.json", statement, identity=scorer.identity):
        if row.sample is None:
            raise SystemExit("\n".join(str(found) for found in row.findings))
        yield row.sample


def with_trainer(sample: Sample, scorer: Scorer) -> Sample:
    """The sample with the model's own logprobs as `proximal_logprobs`."""
    batch = collate([sample], layout="padded", purpose="audit")
    with torch.no_grad():
        logprobs = scorer.score(batch)
    return with_logprobs(batch, logprobs, field="proximal_logprobs")[0]


if __name__ == "__main__":
    main()
