"""Logprobs of other weights, put back onto the samples of a batch."""

from dataclasses import replace

import numpy as np
import pytest
import scoring_cases as cases
import torch
from builders import sample

from rlbatch.collate import Padding, collate, with_logprobs
from rlbatch.errors import RecordError
from rlbatch.records import identical
from rlbatch.scoring import trainer_logprobs

NAN = np.nan
FIELDS = ["teacher_logprobs", "ref_logprobs", "proximal_logprobs"]


def _two():
    """Two sampled tokens behind a prompt of two, of which one is not trained; one behind a prompt of one."""
    first = sample([1, 5], [7, 2], [-0.25, -0.5], trajectory_id="a")
    mask = first.loss_mask.copy()
    mask[3] = False
    return [replace(first, loss_mask=mask), sample([4], [8], [-0.75], trajectory_id="b")]


# Position t is about token t + 1, so the trained tokens 2 of the first and 1 of the second are at 1 and 0.
LAID_OUT = [
    ("padded", Padding(), [[0, -2, -3, 0], [-4, 0, 0, 0]]),
    ("padded", Padding(side="left"), [[0, -2, -3, 0], [0, 0, -4, 0]]),
    ("padded", Padding(sequence_multiple=8), [[0, -2, -3, 0, 0, 0, 0, 0], [-4, 0, 0, 0, 0, 0, 0, 0]]),
    ("packed", Padding(), [[0, -2, -3, 0, -4, 0]]),
    ("packed", Padding(row_multiple=8), [[0, -2, -3, 0, -4, 0, 0, 0]]),
    ("packed", Padding(sequence_multiple=4), [[0, -2, -3, 0, -4, 0, 0, 0]]),
]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(("layout", "padding", "logprobs"), LAID_OUT)
def test_each_logprob_comes_back_to_its_token_and_nan_to_the_untrained(layout, padding, logprobs, field):
    batch = collate(_two(), layout=layout, padding=padding)
    back = with_logprobs(batch, torch.tensor(logprobs, dtype=torch.float32), field=field)
    values = [np.float32([NAN, NAN, -2, NAN]), np.float32([NAN, -4])]
    expected = [replace(made, **{field: own}) for made, own in zip(_two(), values, strict=True)]
    assert all(identical(a, b) for a, b in zip(back, expected, strict=True))


def test_what_was_there_is_replaced_and_the_rest_stays():
    old = np.float32([NAN, NAN, -9, NAN])
    first = replace(_two()[0], ref_logprobs=old, teacher_logprobs=old)
    batch = collate([first], layout="packed")
    back = with_logprobs(batch, torch.full((1, 4), -1.0), field="ref_logprobs")[0]
    assert identical(back, replace(first, ref_logprobs=np.float32([NAN, NAN, -1, NAN])))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_reference_model_gives_each_trained_token_its_own(layout):
    model = cases.tiny_model("llama")
    samples = cases.make_samples()
    batch = collate(samples, layout=layout)
    # With a gradient, as where nobody thought of turning it off.
    back = with_logprobs(batch, trainer_logprobs(model, batch), field="ref_logprobs")
    for made, own in zip(samples, back, strict=True):
        trained = torch.tensor(made.loss_mask.tolist())
        found = torch.tensor(own.ref_logprobs.tolist())
        assert found[~trained].isnan().all()
        expected = cases.true_logprobs(model, made)[trained]
        torch.testing.assert_close(found[trained].double(), expected, atol=1e-4, rtol=0)


def test_a_value_that_is_not_finite_is_passed_on_as_it_is():
    back = with_logprobs(
        collate(_two(), layout="packed"),
        torch.tensor([[0, -torch.inf, 0, 0, torch.nan, 0]]),
        field="proximal_logprobs",
    )
    assert back[0].proximal_logprobs[2] == -np.inf
    # Not left out as if nobody had scored it: a check can still say that it is missing.
    assert np.isnan(back[1].proximal_logprobs).tolist() == [True, True]


@pytest.mark.parametrize(
    ("logprobs", "found"),
    [
        (torch.zeros(1, 5), r"torch.float32 \[1, 5\]"),
        (torch.zeros(6), r"torch.float32 \[6\]"),
        (torch.zeros(1, 6, dtype=torch.bfloat16), r"torch.bfloat16 \[1, 6\]"),
        (np.zeros((1, 6), np.float32), "ndarray"),
    ],
)
def test_what_is_not_of_the_batch_is_refused(logprobs, found):
    with pytest.raises(RecordError, match=rf"expected torch.float32 \[1, 6\], found {found}$"):
        with_logprobs(collate(_two(), layout="packed"), logprobs, field="ref_logprobs")


@pytest.mark.parametrize("field", ["inference_logprobs", "advantages", "ref", None])
def test_only_logprobs_of_other_weights_are_put_so(field):
    with pytest.raises(RecordError, match="field: expected one of teacher_logprobs, ref_logprobs, proximal"):
        with_logprobs(collate(_two(), layout="packed"), torch.zeros(1, 6), field=field)
