"""Several ranks, one verdict: the same error everywhere, naming the rank; nobody waits in vain."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2
TRUTH = [-0.5, -3.0, -0.1, -2.0, -4.0, -0.2, -1.5, -2.5]


def rank_main(rank: int, folder: str, case: str, defer: bool) -> None:
    """One rank of a step; what it raised, or its metrics, goes to a file."""
    from builders import sample

    from rlbatch.alignment import require_aligned
    from rlbatch.collate import collate
    from rlbatch.errors import AlignmentError

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    bad = case == "both" or (case == "one" and rank == 1)
    inference = [-0.9, *TRUTH[:-1]] if bad else [value + 0.001 * rank for value in TRUTH]
    ids = list(range(11, 11 + len(TRUTH)))
    batch = collate([sample([1, 5], ids, inference, trajectory_id=f"rank{rank}")], layout="packed")
    trainer = torch.zeros(batch.shape)
    trainer[batch.loss_mask] = torch.tensor(TRUTH)
    if case == "shape" and rank == 1:
        trainer = trainer[:, 1:]
    try:
        version = "1" if case == "version" and rank == 1 else None
        (alignment,) = require_aligned(
            [batch], [trainer], trainer_version=version, group=dist.group.WORLD, defer=defer
        )
        alignment.verify()
        outcome = alignment.metrics
    except AlignmentError as error:
        outcome = (str(error), error.findings)
    Path(folder, f"outcome{rank}").write_bytes(pickle.dumps(outcome))
    dist.destroy_process_group()


def run(tmp_path, case, defer):
    mp.spawn(rank_main, args=(str(tmp_path), case, defer), nprocs=WORLD)
    return [pickle.loads((tmp_path / f"outcome{rank}").read_bytes()) for rank in range(WORLD)]


@pytest.mark.parametrize(
    ("case", "defer", "ranks"),
    [
        ("one", False, [1]),
        ("both", True, [0, 1]),
        ("shape", False, [1]),
        ("shape", True, [1]),
        ("version", False, [1]),
    ],
)
def test_every_rank_raises_the_same_error(tmp_path, case, defer, ranks):
    first, second = run(tmp_path, case, defer)
    assert first == second
    text, findings = first
    assert [found.where.rank for found in findings] == ranks
    assert all(f"rank {rank}" in text for rank in ranks)


def test_clean_ranks_share_their_metrics(tmp_path):
    first, second = run(tmp_path, "clean", False)
    assert first == second
    assert first["rlbatch/num_tokens/sum"] == 2 * len(TRUTH)
    assert first["rlbatch/abs_log_ratio/mean"] == pytest.approx(0.0005, rel=1e-3)
