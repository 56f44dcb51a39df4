"""A trainer that saves its state after every batch, until it is killed. Run by test_loader_resume."""

import json
import sys
from pathlib import Path

from rlbatch.loader import RolloutLoader, Steps


def main(store: str, state: str, stop_after: str) -> None:
    loader = RolloutLoader(store, layout="packed", max_tokens=64, steps=Steps(step_samples=20, seed=5))
    for number, _ in enumerate(loader):
        temporary = Path(state).with_suffix(".new")
        temporary.write_text(json.dumps(loader.state_dict()))
        temporary.replace(state)
        if number == int(stop_after):
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            # What the killer sees is a process in the middle of its work.
            sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
