"""A sampler that writes a store shard by shard, and waits in the middle. Run by test_loader_follow."""

import sys

from loader_cases import numbered_samples

from rlbatch.storage import open_writer


def main(directory: str, count: str, wait_after: str) -> None:
    with open_writer(directory, max_samples=5) as writer:
        for number, made in enumerate(numbered_samples(int(count))):
            writer.append(made)
            if number == int(wait_after):
                sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
