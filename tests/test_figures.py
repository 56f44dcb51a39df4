"""Figures against plain numpy in float64 and against long-hand arithmetic."""

from fractions import Fraction

import numpy as np
import pytest

from rlbatch.figures import Figures, k3_of


def exact_k3(x: float) -> float:
    """exp(x) - 1 - x by its power series in rational arithmetic."""
    value, term, total = Fraction(x), Fraction(1), Fraction(0)
    for n in range(1, 60):
        term *= value / n
        total += term if n > 1 else 0
    return float(total)


@pytest.mark.parametrize("x", [1e-9, -1e-9, 1e-6, -1e-6, 1e-4, 9.9e-4, 1.1e-3, -0.3, 0.5, 2.0, -5.0])
def test_k3_is_exact_where_the_plain_form_cancels(x):
    assert k3_of(np.array([x]))[0] == pytest.approx(exact_k3(x), rel=1e-9)


def test_k3_of_a_wild_token_stays_finite():
    assert np.isfinite(k3_of(np.array([1e4, -1e4]))).all()
    assert k3_of(np.array([-1e4]))[0] == pytest.approx(1e4 - 1, rel=1e-6)


def test_worked_example():
    figures = Figures.of(np.array([0.5, -0.5, 0.0, 3.0]))
    assert figures.num_tokens == 4
    assert figures.k1 == pytest.approx(-0.75)
    # e^.5 - 1.5 = 0.148721, e^-.5 - 0.5 = 0.106531, e^3 - 4 = 16.085537
    assert figures.k3 == pytest.approx((0.148721 + 0.106531 + 16.085537) / 4, rel=1e-5)
    assert figures.inference_kld_capped == pytest.approx((0.148721 + 0.106531 + 1) / 4, rel=1e-5)
    assert figures.max_abs_log_ratio == 3.0


def test_quantiles_are_those_of_numpy_to_one_bin():
    rng = np.random.default_rng(0)
    values = rng.standard_t(3, 20_000) * 0.01
    figures = Figures.of(values)
    for q in (0.5, 0.9, 0.99, 0.999):
        truth = np.quantile(np.abs(values), q, method="inverted_cdf")
        assert truth <= figures.quantile(q) <= truth * 1.05
    assert figures.quantile(1.0) == figures.max_abs_log_ratio


def test_merging_is_seeing_all_at_once():
    values = np.random.default_rng(1).normal(size=1000)
    whole, parts = Figures.of(values), Figures.of(values[:300]).merge(Figures.of(values[300:]))
    for name in ("num_tokens", "k1", "k3", "inference_kld_capped", "max_abs_log_ratio"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12)
    np.testing.assert_array_equal(parts.histogram, whole.histogram)


def test_no_tokens_give_zeros_and_no_nan():
    figures = Figures.of(np.array([]))
    assert (figures.num_tokens, figures.k1, figures.k3, figures.inference_kld_capped) == (0, 0.0, 0.0, 0.0)
    assert (figures.max_abs_log_ratio, figures.quantile(0.5)) == (0.0, 0.0)
