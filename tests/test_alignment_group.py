"""Several ranks, one verdict: the same error everywhere, naming the rank; nobody waits in vain."""

import os
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlbatch.errors import AlignmentError, Finding

WORLDS = (2, 4)
TRUTH = [-0.5, -3.0, -0.1, -2.0, -4.0, -0.2, -1.5, -2.5]
SHIFTED = [-0.9, *TRUTH[:-1]]
SECONDS_LATE = 1.0
TIMEOUT = 2.0


@dataclass(frozen=True)
class Outcome:
    """What one rank got of one case."""

    error: AlignmentError | None
    metrics: dict[str, float] | None
    warnings: tuple[Finding, ...]
    calls: int
    """Gates passed before the error."""
    judged: bool | None
    seconds: float

    @property
    def said(self) -> Any:
        """Everything of the error that must be equal on all ranks."""
        return None if self.error is None else (type(self.error), str(self.error), self.error.findings)


def one_batch(
    rank: int, inference: list[float], *, version: int | None = None, purpose: str = "train", **changes: Any
) -> Any:
    """A batch of one sample and the trainer's logprobs of it."""
    from builders import sample

    from rlbatch.collate import collate
    from rlbatch.records.turn import VersionSpan

    if version is not None:
        changes["policy_versions"] = (VersionSpan(label=str(version), start=0, stop=len(TRUTH)),)
    ids = list(range(11, 11 + len(TRUTH)))
    made = sample([1, 5], ids, inference, trajectory_id=f"rank{rank}", **changes)
    batch = collate([made], layout="packed", purpose=purpose)
    trainer = torch.zeros(batch.shape)
    trainer[batch.loss_mask] = torch.tensor(TRUTH)
    return batch, trainer


def near_truth(rank: int) -> list[float]:
    return [value + 0.001 * rank for value in TRUTH]


def step(rank: int, inferences: list[list[float]], **options: Any) -> tuple[Any, int]:
    """One whole step of some micro-batches."""
    from rlbatch.alignment import require_aligned

    batches, logprobs = zip(*(one_batch(rank, each) for each in inferences), strict=True)
    options = {"trainer_version": None, "group": dist.group.WORLD} | options
    alignments = require_aligned(list(batches), list(logprobs), **options)
    alignments[0].verify()
    return alignments[0], 1


def clean(rank: int, world: int) -> Any:
    return step(rank, [near_truth(rank)])


def one(rank: int, world: int) -> Any:
    return step(rank, [SHIFTED if rank == 1 else TRUTH])


def every(rank: int, world: int) -> Any:
    return step(rank, [SHIFTED], defer=True)


def late(rank: int, world: int) -> Any:
    if rank == 0:
        time.sleep(SECONDS_LATE)
    return step(rank, [SHIFTED if rank == 1 else TRUTH])


def shape(rank: int, world: int, *, defer: bool = False) -> Any:
    from rlbatch.alignment import require_aligned

    batch, trainer = one_batch(rank, TRUTH)
    trainer = trainer[:, 1:] if rank == 1 else trainer
    (alignment,) = require_aligned(
        [batch], [trainer], trainer_version=None, group=dist.group.WORLD, defer=defer
    )
    alignment.verify()
    return alignment, 1


def shape_deferred(rank: int, world: int) -> Any:
    return shape(rank, world, defer=True)


def samples_of_step(rank: int, world: int) -> Any:
    from dataclasses import replace

    from rlbatch.alignment import require_aligned
    from rlbatch.packing import StepInfo

    batch, trainer = one_batch(rank, TRUTH)
    info = StepInfo(
        **{"epoch": 0, "step": 0, "index": 0, "num_batches": 1, "num_samples": world},
        **{"num_trajectories": world, "num_tokens": 10, "num_loss_tokens": 8},
        samples_crc32=6 if rank == 1 else 5,
    )
    options = {"trainer_version": None, "group": dist.group.WORLD}
    (alignment,) = require_aligned([replace(batch, step=info)], [trainer], **options)
    return alignment, 1


def loaded(rank: int, names: list[str], steps: list[dict[str, Any]], purpose: str = "train") -> Any:
    """A gate of several steps, each of one micro-batch of one sample, as loaders give them."""
    from dataclasses import replace

    from builders import sample

    from rlbatch.alignment import require_aligned
    from rlbatch.collate import collate
    from rlbatch.packing import StepInfo

    batches, logprobs = [], []
    for at, (name, step) in enumerate(zip(names, steps, strict=True)):
        info = {"epoch": 0, "step": at, "index": 0, "num_batches": 1, "num_samples": 2, "num_trajectories": 2}
        ids = list(range(11, 11 + len(TRUTH)))
        made = collate([sample([1, 5], ids, TRUTH, trajectory_id=name)], layout="packed", purpose=purpose)
        batches.append(replace(made, step=StepInfo(**(info | {"num_tokens": 20} | step))))
        trainer = torch.zeros(made.shape)
        trainer[made.loss_mask] = torch.tensor(TRUTH)
        logprobs.append(trainer)
    return require_aligned(batches, logprobs, trainer_version=None, group=dist.group.WORLD)[0], 1


def two_steps(rank: int, world: int) -> Any:
    """Each rank with its own share of two steps."""
    return loaded(rank, [f"a{rank}", f"b{rank}"], [{"num_loss_tokens": 8 * world, "samples_crc32": 5}] * 2)


def two_steps_differ(rank: int, world: int) -> Any:
    """The second of two steps is of other samples on one rank."""
    steps = [{"num_loss_tokens": 8 * world, "samples_crc32": crc} for crc in (5, 7 if rank == 1 else 6)]
    return loaded(rank, [f"a{rank}", f"b{rank}"], steps)


def ranks_forgotten(rank: int, world: int) -> Any:
    """Every loader has the step to itself."""
    return loaded(rank, ["a"], [{"num_loss_tokens": 8}])


def same_rank(rank: int, world: int) -> Any:
    """Loaders share the step out, and two of them ask for the same share."""
    share = 0 if rank == 1 else rank
    return loaded(rank, [f"a{share}"], [{"num_loss_tokens": 8 * world, "samples_crc32": 5}])


def ranks_forgotten_in_order(rank: int, world: int) -> Any:
    """Every loader has both steps to itself, in an order of its own."""
    return loaded(rank, ["b", "a"] if rank else ["a", "b"], [{"num_loss_tokens": 8}] * 2)


def ranks_overlap(rank: int, world: int) -> Any:
    """Each rank has more of the step than its share."""
    return loaded(rank, [f"a{rank}"], [{"num_loss_tokens": 8, "samples_crc32": 5}])


def stores_of_their_own(rank: int, world: int) -> Any:
    """Each rank trains what it sampled itself."""
    return loaded(rank, [f"a{rank}"], [{"num_loss_tokens": 8}])


def same_audit(rank: int, world: int) -> Any:
    """All ranks look at the same samples, which none of them trains."""
    return loaded(rank, ["a"], [{"num_loss_tokens": 8, "samples_crc32": 5}], purpose="audit")


def version_type(rank: int, world: int) -> Any:
    return step(rank, [TRUTH], trainer_version="1" if rank == 1 else None)


def number_of_batches(rank: int, world: int) -> Any:
    return step(rank, [TRUTH] * (3 if rank == 1 else 2))


def version_of_trainer(rank: int, world: int) -> Any:
    return step(rank, [TRUTH], trainer_version=8 if rank == 1 else 7)


def limits(rank: int, world: int) -> Any:
    from rlbatch.alignment import Limits

    return step(rank, [TRUTH], limits=Limits(kld_error=0.2 if rank == 1 else 0.1))


def deferred_by_one(rank: int, world: int) -> Any:
    return step(rank, [TRUTH], defer=rank == 1)


def batch_from_one(rank: int, world: int) -> Any:
    """A micro-batch where the others give a step of one."""
    from rlbatch.alignment import require_aligned

    batch, trainer = one_batch(rank, TRUTH)
    if rank != 1:
        batch, trainer = [batch], [trainer]
    return require_aligned(batch, trainer, trainer_version=None, group=dist.group.WORLD), 1


def incomparable_on_one(rank: int, world: int) -> Any:
    """An audit, in which the tokens of one rank were drawn under a grammar that the trainer does not know."""
    from builders import provenance

    from rlbatch.alignment import require_aligned
    from rlbatch.records import SamplingParams

    how = provenance(sampling=SamplingParams(temperature=1.0, structured_output=rank == 1))
    batch, trainer = one_batch(rank, TRUTH, purpose="audit", provenance=how)
    return require_aligned(batch, trainer, trainer_version=None, group=dist.group.WORLD), 1


def last_of_three(rank: int, world: int) -> Any:
    return step(rank, [TRUTH, TRUTH, SHIFTED if rank == 1 else TRUTH])


def accumulation(rank: int, world: int) -> Any:
    """A gate a micro-batch; the third is bad on one rank."""
    from rlbatch.alignment import require_aligned

    for calls in range(4):
        batch, trainer = one_batch(rank, SHIFTED if (rank, calls) == (1, 2) else TRUTH)
        trainer.requires_grad_()
        try:
            alignment = require_aligned(batch, trainer, trainer_version=None, group=dist.group.WORLD)
        except AlignmentError as error:
            error.add_note(f"{calls} calls")
            raise
        alignment.ratio.sum().backward()
    return alignment, 4


def tail_on_one(rank: int, world: int) -> Any:
    """A warning, which is everybody's as well."""
    values = [*TRUTH[:4], -30.0, *TRUTH[5:]] if rank == 1 else TRUTH
    return step(rank, [values])


def many_ages(rank: int, world: int) -> Any:
    """More ages on each rank than the numbers have room for."""
    from rlbatch.alignment import require_aligned

    parts = [one_batch(rank, near_truth(rank), version=age) for age in range(20)]
    batches, logprobs = zip(*parts, strict=True)
    alignments = require_aligned(
        list(batches), list(logprobs), trainer_version=19, group=dist.group.WORLD, defer=True
    )
    return alignments[0], 1


def bad_callback(rank: int, world: int) -> Any:
    """One rank's values are off, and whoever it asks for logits does not answer."""

    def fails(*_: Any) -> Any:
        raise LookupError("no such row")

    values = [value - 1.0 for value in TRUTH] if rank == 1 else TRUTH
    return step(rank, [values], logits_for=fails)


CASES = (
    *(clean, one, every, late, shape, shape_deferred, version_type, number_of_batches),
    *(version_of_trainer, limits, samples_of_step, last_of_three, accumulation, tail_on_one),
    *(many_ages, bad_callback, deferred_by_one, batch_from_one, incomparable_on_one),
    *(two_steps, two_steps_differ, ranks_forgotten, same_rank, ranks_overlap),
    *(ranks_forgotten_in_order, stores_of_their_own, same_audit),
)


def without_last(rank: int, group: Any) -> Any:
    """The last rank of the group does not come."""
    from rlbatch.alignment import Limits

    return step(rank, [TRUTH], group=group, limits=Limits(rank_timeout=TIMEOUT))


def asked_again(rank: int, world: int, group: Any) -> Any:
    """The last rank comes to the gate, not to the verdict; the others ask for that in every way there is."""
    from rlbatch.alignment import Limits, require_aligned

    options = {"group": group, "limits": Limits(rank_timeout=TIMEOUT), "defer": True}
    alignment = require_aligned(*one_batch(rank, TRUTH), trainer_version=None, **options)
    if rank == world - 1:
        return None
    said, began = [], time.monotonic()
    for ask in ("verify", "metrics", "warnings", "judged"):
        try:
            getattr(alignment, ask)()
        except AlignmentError as error:
            said.append((error.code, time.monotonic() - began))
    return said


def outcome_of(run: Any) -> Outcome:
    began = time.monotonic()
    error, metrics, warnings, calls, judged = None, None, (), 0, None
    try:
        alignment, calls = run()
        metrics, warnings, judged = alignment.metrics, alignment.warnings, alignment.judged
    except AlignmentError as raised:
        error = raised
        calls = int(getattr(raised, "__notes__", ["0"])[0].split()[0])
    return Outcome(
        error=error,
        metrics=metrics,
        warnings=warnings,
        calls=calls,
        judged=judged,
        seconds=time.monotonic() - began,
    )


def rank_main(rank: int, folder: str, world: int) -> None:
    """Every case in turn; those that break a group come last, each with a group of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    outcomes = {case.__name__: outcome_of(lambda case=case: case(rank, world)) for case in CASES}
    without_first, left, silent, dead = (dist.new_group(list(range(first, world))) for first in (1, 0, 0, 0))
    if rank:
        odd = SHIFTED if rank == 1 else TRUTH
        outcomes["without_first"] = outcome_of(lambda: step(rank, [odd], group=without_first))
    dist.barrier()
    outcomes["asked_again"] = asked_again(rank, world, left)
    is_last = rank == world - 1
    if not is_last:
        outcomes["silent"] = outcome_of(lambda: without_last(rank, silent))
    dist.barrier()
    if not is_last:
        outcomes["dead"] = outcome_of(lambda: without_last(rank, dead))
    Path(folder, f"outcomes{rank}").write_bytes(pickle.dumps(outcomes))
    # No farewells: the groups are broken, and a dead process says none.
    os._exit(0)


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world}ranks")
def ranks(request, tmp_path_factory):
    """What each rank got of each case, in a world that is started once."""
    folder = tmp_path_factory.mktemp("world")
    mp.spawn(rank_main, args=(str(folder), request.param), nprocs=request.param)
    return [pickle.loads((folder / f"outcomes{rank}").read_bytes()) for rank in range(request.param)]


@pytest.mark.parametrize(
    ("case", "code", "on_every_rank"),
    [
        ("one", "shifted", False),
        ("every", "shifted", True),
        ("late", "shifted", False),
        ("last_of_three", "shifted", False),
        ("accumulation", "shifted", False),
        ("shape", "batch-mismatch", False),
        ("shape_deferred", "batch-mismatch", False),
        ("version_type", "batch-mismatch", False),
        ("bad_callback", "batch-mismatch", False),
        ("number_of_batches", "ranks-differ", False),
        ("version_of_trainer", "ranks-differ", False),
        ("limits", "ranks-differ", False),
        ("samples_of_step", "ranks-differ", False),
        ("deferred_by_one", "ranks-differ", False),
        ("batch_from_one", "ranks-differ", False),
        ("two_steps_differ", "ranks-differ", False),
        ("ranks_forgotten", "ranks-differ", False),
        ("same_rank", "ranks-differ", False),
        ("ranks_forgotten_in_order", "ranks-differ", False),
    ],
)
def test_every_rank_raises_the_same_error(ranks, case, code, on_every_rank):
    said = [outcomes[case].said for outcomes in ranks]
    assert all(each == said[0] for each in said)
    _, text, findings = said[0]
    bad = list(range(len(ranks))) if on_every_rank else [1]
    assert [(found.code, found.where.rank) for found in findings] == [(code, rank) for rank in bad]
    assert all(f"rank {rank}" in text for rank in bad)


def test_a_part_of_the_ranks_names_them_as_all_do(ranks):
    # Rank 1 is the first of the group that rank 0 is not in.
    for outcomes in ranks[1:]:
        (found,) = outcomes["without_first"].error.findings
        assert (found.code, found.where.rank, found.where.trajectory) == ("shifted", 1, "rank1")


def test_what_one_rank_cannot_compare_leaves_the_step_unjudged_on_all(ranks):
    for outcomes in ranks:
        outcome = outcomes["incomparable_on_one"]
        assert [(found.code, found.where.rank) for found in outcome.warnings] == [("incomparable", 1)]
        assert outcome.judged is False
        # The one turn of rank 1; those of the others are compared.
        assert outcome.metrics["rlbatch/num_excluded_segments/sum"] == 1
        assert outcome.metrics["rlbatch/num_tokens/sum"] == (len(ranks) - 1) * len(TRUTH)


def test_a_verdict_that_a_rank_did_not_come_to_is_waited_for_once(ranks):
    for outcomes in ranks[:-1]:
        codes, seconds = zip(*outcomes["asked_again"], strict=True)
        assert codes == ("rank-silent",) * 4
        assert seconds[0] >= TIMEOUT / 2
        assert seconds[3] - seconds[0] < TIMEOUT / 2


def test_the_sample_is_named_with_its_rank(ranks):
    (found,) = ranks[0]["one"].error.findings
    assert (found.where.rank, found.where.trajectory, found.where.sample) == (1, "rank1", 0)


def test_what_a_failing_callback_said_is_told_on_every_rank_with_the_place_that_was_asked_for(ranks):
    for outcomes in ranks:
        (found,) = outcomes["bad_callback"].error.findings
        assert "LookupError: no such row" in found.found
        assert (found.where.rank, found.where.trajectory) == (1, "rank1")


def test_unequal_numbers_of_batches_are_told_by_rank(ranks):
    (found,) = ranks[0]["number_of_batches"].error.findings
    assert "2 on rank 0, 3 on rank 1" in found.found


def test_steps_of_other_samples_blame_the_loaders_seed_and_position(ranks):
    for case in ("samples_of_step", "two_steps_differ"):
        (found,) = ranks[0][case].error.findings
        assert "seed" in found.likely
        assert "state_dict" in found.fix


def test_ranks_that_hold_the_same_samples_are_told_and_how_to_share_them_out(ranks):
    for case in ("ranks_forgotten", "same_rank"):
        (found,) = ranks[0][case].error.findings
        assert found.found == "those of rank 0 again, 8 trained tokens"
        assert "num_ranks" in found.fix
    (found,) = ranks[0]["ranks_overlap"].error.findings
    # Eight tokens a rank, of a step that has eight.
    assert (found.where.rank, found.found) == (None, str(8 * len(ranks)))
    assert found.expected.startswith("the 8 trained tokens of the step")


@pytest.mark.parametrize("case", ["two_steps", "stores_of_their_own", "same_audit"])
def test_own_shares_and_what_nobody_trains_are_nobodys_twice(ranks, case):
    for outcomes in ranks:
        assert (outcomes[case].error, outcomes[case].warnings) == (None, ())


def test_a_late_rank_is_waited_for(ranks):
    assert ranks[1]["late"].seconds >= SECONDS_LATE / 2


def test_gates_before_the_bad_micro_batch_are_passed_by_all(ranks):
    assert [outcomes["accumulation"].calls for outcomes in ranks] == [2] * len(ranks)


@pytest.mark.parametrize("case", ["silent", "dead"])
def test_a_rank_that_does_not_come_is_an_error_in_time(ranks, case):
    for outcomes in ranks[:-1]:
        assert outcomes[case].error.code == "rank-silent"
        assert outcomes[case].seconds < 4 * TIMEOUT
    assert len({str(outcomes[case].error) for outcomes in ranks[:-1]}) == 1


def test_clean_ranks_share_their_metrics(ranks):
    metrics = [outcomes["clean"].metrics for outcomes in ranks]
    assert all(each == metrics[0] for each in metrics)
    world = len(ranks)
    assert metrics[0]["rlbatch/num_tokens/sum"] == world * len(TRUTH)
    # Rank r is 0.001 r off at every token.
    assert metrics[0]["rlbatch/abs_log_ratio/mean"] == pytest.approx(0.001 * (world - 1) / 2, rel=1e-3)
    assert metrics[0]["rlbatch/abs_log_ratio/max"] == pytest.approx(0.001 * (world - 1), rel=1e-2)


def test_a_warning_of_one_rank_is_everybodys(ranks):
    for outcomes in ranks:
        warnings = outcomes["tail_on_one"].warnings
        # That there is too little to judge is of no one rank.
        assert [(found.code, found.where.rank) for found in warnings] == [
            ("ratio-tail", 1),
            ("too-few-to-judge", None),
        ]


def test_more_ages_than_slots_are_all_counted(ranks):
    for outcomes in ranks:
        metrics = outcomes["many_ages"].metrics
        assert all(
            metrics[f"rlbatch/num_tokens/version_lag_{age}"] == len(ranks) * len(TRUTH) for age in range(20)
        )


def test_ranks_that_repeat_each_others_names_have_samples_of_their_own():
    from dataclasses import replace

    from builders import sample

    from rlbatch.alignment.agreement import occasion_of
    from rlbatch.collate import collate
    from rlbatch.packing import StepInfo

    def share(values: list[float]) -> int | None:
        ids = list(range(11, 11 + len(values)))
        made = collate([sample([1, 5], ids, values, trajectory_id="0")], layout="packed")
        info = {"epoch": 0, "step": 0, "index": 0, "num_batches": 1, "num_samples": 1, "num_trajectories": 1}
        step = StepInfo(**info | {"num_tokens": 2 + len(values), "num_loss_tokens": len(values)})
        return occasion_of([replace(made, step=step)], is_whole=True, is_early=False).share_crc32

    assert share(TRUTH) == share(TRUTH)
    assert share(TRUTH) != share(TRUTH[:-1])
