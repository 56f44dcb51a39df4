"""Whatever is handed to the gate: a named finding or error, no exception from below, no NaN in a metric.

Warnings of numpy and torch are errors here, as everywhere in these tests.
"""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import sample

from rlbatch.alignment import require_aligned
from rlbatch.batch import LAYOUTS
from rlbatch.collate import collate
from rlbatch.errors import AlignmentError, RecordError

VOCAB_SIZE = 64
LENGTHS = (40, 25, 40, 25, 40, 25)
ONE_TOKEN = 5
FEW = "too-few-to-judge"
"""Which trained position is spoilt where one is."""
FEW = "too-few-to-judge"
"""Warned of as well, where tokens are off that are too few to say more."""


def rows(lengths=LENGTHS, *, value=None):
    """Samples of so many tokens, at logprobs drawn at random or all of one value."""
    rng = np.random.default_rng(0)
    made = []
    for at, length in enumerate(lengths):
        ids = rng.integers(6, VOCAB_SIZE, length).tolist()
        logprobs = -rng.exponential(1, length) if value is None else np.full(length, value)
        made.append(sample([1, 5], ids, logprobs.tolist(), trajectory_id=f"t{at}"))
    return made


def gate(batch, trainer, **options):
    """(codes of the error, or of the warnings); all that a passing gate gives is finite."""
    try:
        (alignment,) = require_aligned([batch], [trainer], trainer_version=None, **options)
    except AlignmentError as error:
        return {found.code for found in error.findings}
    assert all(math.isfinite(value) for value in alignment.metrics.values())
    for values in (alignment.log_ratio, alignment.ratio, alignment.inference_kld):
        assert bool(torch.isfinite(values).all())
    return {found.code for found in alignment.warnings}


def truth(batch):
    """A trainer that agrees with the engine."""
    return torch.nan_to_num(batch.inference_logprobs)


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


def test_nothing_trained_is_an_error_of_a_step_and_one_masked_row_is_none(layout):
    batch = collate(rows(), layout=layout)
    masked = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert gate(masked, truth(masked)) == {"nothing-trained"}
    some = rows()
    some[1] = replace(some[1], loss_mask=np.zeros_like(some[1].loss_mask))
    batch = collate(some, layout=layout)
    assert gate(batch, truth(batch)) == set()


def test_empty_batches_are_refused_by_name(layout):
    with pytest.raises(RecordError, match="expected at least one sample, found none"):
        collate([], layout=layout)
    with pytest.raises(RecordError, match="0 batches"):
        require_aligned([], [], trainer_version=None)


@pytest.mark.parametrize(("off", "codes"), [(0.0, set()), (-3.0, {FEW}), (-1e4, {"ratio-tail", FEW})])
def test_rows_of_one_token_are_too_short_for_more_than_a_warning(layout, off, codes):
    batch = collate(rows([1] * 8), layout=layout)
    assert gate(batch, truth(batch) + off) == codes
    (alignment,) = require_aligned([batch], [truth(batch) + off], trainer_version=None)
    assert alignment.judged is (off == 0)


@pytest.mark.parametrize(
    ("value", "off", "codes"),
    [(-1.0, 0.0, set()), (0.0, 0.0, set()), (-1.0, -0.7, {"unexplained"}), (0.0, -2.0, {"zero-filled"})],
)
def test_constant_logprobs_suggest_no_lag_and_no_row(layout, value, off, codes):
    batch = collate(rows(value=value), layout=layout)
    assert gate(batch, truth(batch) + off) == codes


@pytest.mark.parametrize("is_all", [False, True], ids=["one token", "all tokens"])
@pytest.mark.parametrize(
    ("side", "value", "code"),
    [
        ("trainer", math.nan, "trainer-not-finite"),
        ("trainer", math.inf, "trainer-not-finite"),
        ("trainer", -math.inf, "trainer-not-finite"),
        ("trainer", 1e4, "logprob-positive"),
        ("trainer", 3e38, "logprob-positive"),
        ("inference", math.nan, "logprob-missing"),
        ("inference", math.inf, "logprob-not-finite"),
        ("inference", -math.inf, "logprob-not-finite"),
        ("inference", 1e4, "logprob-positive"),
        ("inference", -1e4, "logprob-sentinel"),
        ("inference", -3e38, "logprob-sentinel"),
    ],
)
def test_values_that_no_logprob_has_are_named(layout, side, value, code, is_all):
    batch = collate(rows(), layout=layout)
    trained = batch.loss_mask.nonzero()
    at = tuple((trained if is_all else trained[ONE_TOKEN : ONE_TOKEN + 1]).T)
    trainer, inference = truth(batch), batch.inference_logprobs.clone()
    (trainer if side == "trainer" else inference)[at] = value
    assert gate(replace(batch, inference_logprobs=inference), trainer) == {code}


@pytest.mark.parametrize("value", [-1e4, -1e30])
def test_log_ratios_of_any_size_leave_the_figures_finite(layout, value):
    batch = collate(rows(), layout=layout)
    trained = batch.loss_mask.nonzero()
    trainer = truth(batch)
    trainer[tuple(trained[ONE_TOKEN])] = value
    assert gate(batch, trainer) == {"ratio-tail", FEW}
    trainer[tuple(trained.T)] = value
    assert gate(batch, trainer) == {"unexplained"}


def test_sums_beyond_any_float_are_named_without_a_warning_and_spoil_no_others(layout):
    batch = collate(rows([200] * 6), layout=layout)
    trainer = truth(batch)
    for segment in batch.host_segments[:3]:
        # As masked logits give them, over part of a row's first window.
        trainer[segment.row, segment.start + 2 : segment.start + 42] = torch.finfo(torch.float32).min
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gate(batch, trainer) == {"unexplained"}


def test_logprobs_of_another_batch_are_refused_or_named(layout):
    batch = collate(rows(), layout=layout)
    assert gate(batch, truth(batch)[:, 1:]) == {"batch-mismatch"}
    other = collate(list(reversed(rows([40] * 6))), layout=layout)
    same = collate(rows([40] * 6), layout=layout)
    assert gate(same, truth(other)) == {"rows-permuted"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_dtypes_that_cannot_be_compared_are_refused_on_either_side(layout, dtype):
    batch = collate(rows(), layout=layout)
    assert gate(batch, truth(batch).to(dtype)) == {"batch-mismatch"}
    assert gate(replace(batch, inference_logprobs=truth(batch).to(dtype)), truth(batch)) == {"batch-mismatch"}
    assert gate(replace(batch, loss_mask=batch.loss_mask.to(dtype)), truth(batch)) == {"batch-mismatch"}


def test_float64_on_either_side_is_compared(layout):
    batch = collate(rows(), layout=layout)
    assert gate(batch, truth(batch).double()) == set()
    assert gate(replace(batch, inference_logprobs=batch.inference_logprobs.double()), truth(batch)) == set()


def with_column(value):
    """Zeros, but for one id that is the target of nothing."""

    def answer(batch, index, start, stop):
        logits = torch.zeros(stop - start, VOCAB_SIZE)
        logits[:, 0] = value
        return logits

    return answer


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (lambda *asked: 1 / 0, "batch-mismatch"),
        (lambda *asked: None, "batch-mismatch"),
        (lambda batch, index, start, stop: torch.zeros(stop - start - 1, VOCAB_SIZE), "batch-mismatch"),
        (lambda batch, index, start, stop: torch.zeros(stop - start, 6), "batch-mismatch"),
        (with_column(math.nan), "batch-mismatch"),
        (with_column(math.inf), "batch-mismatch"),
        (with_column(1e30), "batch-mismatch"),
        # An id that the model rules out, and logits without any information: answers, if of no use.
        (with_column(-math.inf), "trainer-logprobs-differ"),
        (with_column(0.0), "trainer-logprobs-differ"),
    ],
)
def test_a_callback_that_fails_or_answers_nonsense_is_named(layout, answer, code):
    batch = collate(rows(), layout=layout)
    noise = 2 * torch.rand(batch.shape, generator=torch.Generator().manual_seed(0))
    assert code in gate(batch, truth(batch) - noise, logits_for=answer)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_ratios_that_are_asked_for_later_still_reach_the_trainer(mode):
    batch = collate(rows(), layout="packed")
    trainer = truth(batch).requires_grad_()
    (alignment,) = require_aligned([batch], [trainer], trainer_version=None)
    with mode():
        assert alignment.compared.any()
        assert alignment.log_ratio.requires_grad
    alignment.ratio.sum().backward()
    # Engine and trainer agree: a ratio of 1, whose derivative is 1 where it is trained.
    assert torch.equal(trainer.grad, batch.loss_mask.float())


def test_ratios_of_a_pass_without_gradients_have_none():
    batch = collate(rows(), layout="packed")
    trainer = truth(batch).requires_grad_()
    with torch.no_grad():
        (alignment,) = require_aligned([batch], [trainer], trainer_version=None)
    assert not alignment.ratio.requires_grad


@pytest.mark.parametrize("changed", ["trainer", "inference_logprobs", "loss_mask"])
def test_ratios_are_of_the_values_that_were_judged_or_an_error(changed):
    batch = collate(rows(), layout="packed")
    trainer = truth(batch)
    (alignment,) = require_aligned([batch], [trainer], trainer_version=None)
    (trainer if changed == "trainer" else getattr(batch, changed)).zero_()
    with pytest.raises(AlignmentError, match="changed in place since"):
        _ = alignment.ratio
