"""Every row of the tables of a real engine against a trainer that can be repeated: figures and verdict.

The expected figures were measured once, outside this library, on the recorded rollouts: mean k3 and mean
|log_ratio|, nats. Rows whose server or sampling was not recorded are left out: temperature 2, raw values at
1.3, min-p, and 400 tokens in bf16. What the gate must say of each row is beside it.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import provenance, recorded_provenance, sample
from kept_by_hand import kept_by_hand

from rlbatch.alignment import Judge, Limits, measure
from rlbatch.collate import collate
from rlbatch.records import SamplingParams
from rlbatch.soundness import check_sound

DATA = Path(__file__).parent / "data" / "vllm-0.32.0" / "rollouts"


@dataclass
class Row:
    """One recorded row with a trainer beside it; what a corruption changes."""

    prompt: list[int]
    ids: list[int]
    inference: np.ndarray
    logits: torch.Tensor
    """[C, V] float64: row c predicts token c of the completion."""
    trainer: np.ndarray


class Engine:
    """The recorded rows, and the model that scores them with plain logits and a float64 softmax."""

    def __init__(self, model):
        self.model = model

    def logits(self, prompt, ids, *, before=(), positions=None, mask=None):
        """[C + 1, V]: row c predicts token c, the last one what follows."""
        whole = torch.tensor([[*before, *prompt, *ids]])
        how = {"use_cache": False}
        if positions is not None:
            how["position_ids"] = torch.tensor([positions])
        if mask is not None:
            how["attention_mask"] = torch.tensor([mask])
        with torch.no_grad():
            logits = self.model(whole, **how).logits[0].double()
        return logits[len(before) + len(prompt) - 1 :]

    def row(self, prompt, ids, inference, *, divisor=1.0, rules=None, **how):
        logits = self.logits(prompt, ids, **how)[:-1]
        return Row(prompt, ids, np.asarray(inference), logits, logprobs(logits, ids, divisor, rules or {}))

    def rows(self, name, **how):
        content = json.loads((DATA / f"{name}.json").read_text())
        return [self.row(each["prompt_ids"], each["ids"], each["lp"], **how) for each in content["rows"]]


def logprobs(logits, ids, divisor=1.0, rules=None):
    divided = logits / divisor
    if rules:
        divided = divided.clone()
        for row in divided:
            outside = torch.ones(len(row), dtype=torch.bool)
            outside[kept_by_hand(row.tolist(), **rules)] = False
            row[outside] = -torch.inf
    return torch.log_softmax(divided, -1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def engine(tinylm_dir):
    from transformers import AutoModelForCausalLM

    return Engine(AutoModelForCausalLM.from_pretrained(tinylm_dir, dtype=torch.float32).eval())


def verdict_of(rows, how, *, layout="padded"):
    samples = samples_of(rows, how)
    batch = collate(samples, layout=layout, purpose="audit")
    trainer = torch.zeros(batch.shape, dtype=torch.float64)
    for segment, row in zip(batch.host_segments, rows, strict=True):
        trainer[segment.row, segment.start : segment.stop] = torch.from_numpy(row.trainer)

    def logits_for(_, index, start, stop):
        first = batch.host_segments[index].start
        return rows[index].logits[start - first : stop - first]

    # A file has about 600 tokens: the limits are made to apply to them.
    judge = Judge(trainer_version=None, limits=Limits(min_tokens=500), logits_for=logits_for)
    judge.add(measure(batch, trainer))
    return judge.verdict()


def samples_of(rows, how):
    return [
        sample(row.prompt, row.ids, row.inference, provenance=how, trajectory_id=f"row{at}")
        for at, row in enumerate(rows)
    ]


def figures(rows):
    """Tokens, k3, mean and largest |log_ratio|: float64, by the definitions."""
    log_ratio = np.concatenate([row.trainer - row.inference for row in rows])
    size = np.abs(log_ratio)
    return len(size), (np.expm1(log_ratio) - log_ratio).mean(), size.mean(), size.max()


def codes(verdict):
    return {found.code for found in verdict.findings}


# -- handled correctly ---------------------------------------------------------------------------------------

CLEAN = [
    # file, temperature, kept set, tokens, k3, mean |log_ratio|
    ("fp32_raw__t1", 1.0, {}, 604, 1.507e-13, 1.70e-07),
    ("fp32_raw__t07", 1.0, {}, 569, 9.487e-14, 1.35e-07),
    ("fp32_raw__t1_topp08", 1.0, {}, 588, 7.596e-14, 1.16e-07),
    ("fp32_raw__t1_topk20", 1.0, {}, 588, 1.222e-13, 1.64e-07),
    ("fp32_raw__long400", 1.0, {}, 2400, 4.377e-13, 3.37e-07),
    ("fp32_processed__t1", 1.0, {}, 604, 1.507e-13, 1.70e-07),
    ("fp32_processed__t07", 0.7, {}, 569, 2.061e-13, 1.68e-07),
    ("fp32_processed__t13", 1.3, {}, 599, 8.830e-14, 1.77e-07),
    ("fp32_processed__t1_topp08", 1.0, {"top_p": 0.8}, 588, 7.033e-14, 9.76e-08),
    ("fp32_processed__t1_topk20", 1.0, {"top_k": 20}, 588, 1.208e-13, 1.59e-07),
    ("fp32_processed__t07_topp08", 0.7, {"top_p": 0.8}, 538, 8.947e-14, 1.12e-07),
    ("bf16_raw__t1", 1.0, {}, 604, 2.504e-05, 2.37e-03),
    ("bf16_raw__t07", 1.0, {}, 561, 1.340e-05, 1.87e-03),
    ("bf16_raw__t13", 1.0, {}, 599, 3.575e-05, 3.00e-03),
    ("bf16_processed__t1", 1.0, {}, 604, 2.504e-05, 2.37e-03),
    ("bf16_processed__t07", 0.7, {}, 561, 2.495e-05, 2.15e-03),
]
"""A trainer in float32. Kept sets in bf16, which leave some tokens outside, have a test of their own."""


@pytest.mark.parametrize(("name", "temperature", "rules", "tokens", "k3", "mean"), CLEAN)
def test_what_is_handled_correctly_has_the_tables_figures_and_is_sound(
    engine, name, temperature, rules, tokens, k3, mean
):
    rows = engine.rows(name, divisor=temperature, rules=rules)
    found = figures(rows)
    assert found[0] == tokens
    if name.startswith("fp32"):
        # Rounding alone, which another processor does otherwise.
        assert found[1] < 1e-11
        assert found[3] < 1e-4
    else:
        assert found[1:3] == (pytest.approx(k3, rel=0.01), pytest.approx(mean, rel=0.01))
    verdict = verdict_of(rows, recorded_provenance(DATA / f"{name}.json"))
    assert (codes(verdict), verdict.judged) == (set(), True)


@pytest.mark.parametrize(
    ("first", "most"), [(0, 2.016e-13), (100, 2.564e-13), (200, 3.378e-13), (300, 9.551e-13)]
)
def test_rounding_grows_along_a_row_and_stays_rounding(engine, first, most):
    part = slice(first, first + 100)
    rows = [
        replace(row, inference=row.inference[part], trainer=row.trainer[part])
        for row in engine.rows("fp32_raw__long400")
    ]
    tokens, k3, _, _ = figures(rows)
    assert tokens == 600
    assert k3 < 10 * most


@pytest.mark.parametrize(
    ("name", "temperature", "k3", "mean"),
    [
        ("bf16_raw__t1", 1.0, 2.886e-05, 2.01e-03),
        ("bf16_raw__t07", 1.0, 1.223e-05, 1.38e-03),
        ("bf16_raw__t13", 1.0, 3.935e-05, 2.60e-03),
        ("fp32_raw__t1", 1.0, 1.984e-05, 2.28e-03),
        ("bf16_processed__t07", 0.7, 2.354e-05, 1.58e-03),
    ],
)
def test_a_trainer_in_bf16_is_sound_whatever_the_engine_ran_in(tinylm_dir, name, temperature, k3, mean):
    from transformers import AutoModelForCausalLM

    engine = Engine(AutoModelForCausalLM.from_pretrained(tinylm_dir, dtype=torch.bfloat16).eval())
    rows = engine.rows(name, divisor=temperature)
    _, found_k3, found_mean, _ = figures(rows)
    # bf16 products are rounded in another order on every processor.
    assert k3 / 2 < found_k3 < 2 * k3
    assert mean / 1.5 < found_mean < 1.5 * mean
    verdict = verdict_of(rows, recorded_provenance(DATA / f"{name}.json"))
    assert (codes(verdict), verdict.judged) == (set(), True)


# -- corruptions ---------------------------------------------------------------------------------------------


NAMELESS = ("unexplained", "kld-high")
"""Something is off, and nothing is said of what."""


@dataclass
class Corruption:
    """One row of the table: how it is made, its figures, and what may be said of it."""

    make: Callable[[Engine, list[Row]], list[Row]]
    tokens: int
    k3: float
    mean: float
    must: str | None = None
    """The code that has to be among them."""
    may: tuple[str, ...] = ()
    """What else would be no wrong name."""
    name: str = "fp32_raw__t1"
    is_sound: bool = False
    """So small a fault that the file is rightly called sound: only ids, lengths or a grid can show it."""


def rescored(**how):
    return lambda engine, rows: [engine.row(row.prompt, row.ids, row.inference, **how) for row in rows]


def with_prompt(change):
    return lambda engine, rows: [engine.row(change(row.prompt), row.ids, row.inference) for row in rows]


def engine_gave(change):
    return lambda engine, rows: [replace(row, inference=change(row.inference)) for row in rows]


def trainer_moved(by):
    return lambda engine, rows: [replace(row, trainer=np.roll(row.trainer, by)) for row in rows]


def no_causal_shift(engine, rows):
    return [replace(row, trainer=logprobs(engine.logits(row.prompt, row.ids)[1:], row.ids)) for row in rows]


def cut(row, length, inference=None):
    values = row.inference if inference is None else inference
    return Row(row.prompt, row.ids[:length], values[:length], row.logits[:length], row.trainer[:length])


def of_the_next_row(engine, rows):
    neighbours = zip(rows, [*rows[1:], rows[0]], strict=True)
    return [cut(row, min(len(row.ids), len(other.ids)), other.inference) for row, other in neighbours]


def eos_lost(is_left_aligned):
    def make(engine, rows):
        return [cut(row, len(row.ids) - 1, row.inference[0 if is_left_aligned else 1 :]) for row in rows]

    return make


def end_padded_with_zero(engine, rows):
    return [replace(row, trainer=np.append(row.trainer[:-1], 0.0)) for row in rows]


def behind_the_row_before(*, restart):
    def make(engine, rows):
        made = []
        for row, other in zip(rows, [rows[-1], *rows[:-1]], strict=True):
            before = other.prompt + other.ids
            whole = len(before) + len(row.prompt + row.ids)
            positions = [*range(len(before)), *range(whole - len(before))] if restart else None
            how = {"before": before, "positions": positions, "mask": [1] * whole if restart else None}
            made.append(engine.row(row.prompt, row.ids, row.inference, **how))
        return made

    return make


def left_padded(engine, rows):
    made = []
    for row in rows:
        how = {"before": [PAD] * 7, "mask": [0] * 7 + [1] * len(row.prompt + row.ids)}
        made.append(engine.row(row.prompt, row.ids, row.inference, **how))
    return made


def to(dtype):
    return lambda values: torch.tensor(values).to(dtype).double().numpy()


NEWLINE, PAD, BOS = 203, 0, 1

CORRUPTIONS = {
    "shifted +1": Corruption(trainer_moved(-1), 604, 65.63, 1.04, "shifted"),
    "shifted -1": Corruption(trainer_moved(1), 604, 120.8, 1.08, "shifted"),
    "no causal shift": Corruption(no_causal_shift, 604, 12.97, 14.0, "no-causal-shift"),
    "bos missing": Corruption(
        with_prompt(lambda ids: ids[1:]), 604, 6.158e-3, 2.61e-2, may=("prefix-differs",)
    ),
    "double bos": Corruption(
        with_prompt(lambda ids: [BOS, *ids]), 604, 4.788e-4, 7.58e-3, may=("prefix-differs",)
    ),
    "other row": Corruption(of_the_next_row, 486, 142.9, 0.954, "rows-permuted"),
    # Where only the first token is off, a wrong id in its place would look the same.
    "last prompt token dropped": Corruption(
        with_prompt(lambda ids: ids[:-1]),
        604, 0.781, 0.856,
        may=("prefix-differs", "wrong-ids"),
    ),
    "newline before the answer": Corruption(
        with_prompt(lambda ids: [*ids, NEWLINE]),
        604, 0.3123, 0.384,
        may=("prefix-differs",),
    ),
    "eos lost, left-aligned": Corruption(eos_lost(True), 572, 1.574e-13, 1.73e-7, is_sound=True),
    "eos lost, right-aligned": Corruption(eos_lost(False), 572, 127.4, 1.10, "shifted"),
    "eos missing, trainer padded with 0": Corruption(
        end_padded_with_zero, 604, 4.535e-3, 8.55e-3, may=("trainer-logprobs-differ",)
    ),
    "left padding with a mask": Corruption(left_padded, 604, 1.326e-13, 1.63e-7, is_sound=True),
    "left padding without a mask": Corruption(
        rescored(before=[PAD] * 7), 604, 2.433e-3, 1.10e-2, may=("prefix-differs",)
    ),
    "stored as bf16": Corruption(engine_gave(to(torch.bfloat16)), 604, 3.595e-6, 8.21e-4, is_sound=True),
    "stored as fp16": Corruption(engine_gave(to(torch.float16)), 604, 5.981e-8, 1.07e-4, is_sound=True),
    "three decimals": Corruption(engine_gave(lambda v: v.round(3)), 604, 3.264e-8, 2.09e-4, is_sound=True),
    "all zero": Corruption(engine_gave(np.zeros_like), 604, 0.4219, 0.586, "zero-filled"),
    "base 2": Corruption(engine_gave(lambda v: v / np.log(2)), 604, 0.8737, 0.259, "wrong-base"),
    "sign flipped": Corruption(
        engine_gave(np.negative), 604, 0.9822, 1.17, "sign-flipped", ("logprob-positive",)
    ),
    "raw logits": Corruption(rescored(), 604, 13.43, 14.4, "logprob-positive", name="fp32_rawlogits__t1"),
}  # fmt: skip

IN_BF16 = {
    "shifted +1": (65.30, 1.03),
    "shifted -1": (120.3, 1.07),
    "no causal shift": (12.97, 14.0),
    "bos missing": (6.313e-3, 2.65e-2),
    "double bos": (4.594e-4, 8.04e-3),
    "other row": (142.4, 0.935),
    "last prompt token dropped": (0.7807, 0.856),
    "newline before the answer": (0.3125, 0.384),
}
"""k3 and mean |log_ratio| of the rows that the table has for an engine in bf16 too."""
BF16_ROWS = {
    f"{case}, bf16": replace(CORRUPTIONS[case], name="bf16_raw__t1", k3=k3, mean=mean)
    for case, (k3, mean) in IN_BF16.items()
}


@pytest.mark.parametrize("case", [*CORRUPTIONS, *BF16_ROWS])
def test_a_corruption_has_the_tables_figures_and_no_wrong_name(engine, case):
    row = (CORRUPTIONS | BF16_ROWS)[case]
    rows = row.make(engine, engine.rows(row.name))
    tokens, k3, mean, _ = figures(rows)
    assert tokens == row.tokens
    if row.k3 > 1e-10:
        # A roll moves the ends of the rows too, which the table left to chance.
        assert (k3, mean) == (pytest.approx(row.k3, rel=0.02), pytest.approx(row.mean, rel=0.06))
    else:
        assert k3 < 1e-11
    verdict = verdict_of(rows, recorded_provenance(DATA / f"{row.name}.json"))
    said = codes(verdict)
    assert said <= {row.must, *row.may, *NAMELESS}
    assert row.must is None or row.must in said
    if row.is_sound or row.must:
        assert verdict.judged is row.is_sound


def test_values_stored_as_bf16_are_told_by_their_grid(engine):
    rows = CORRUPTIONS["stored as bf16"].make(engine, engine.rows("fp32_raw__long400"))
    found = check_sound(
        samples_of(rows, recorded_provenance(DATA / "fp32_raw__long400.json")), purpose="train"
    )
    assert {each.code for each in found} == {"low-precision-logprobs"}


@pytest.mark.parametrize(("restart", "k3", "mean"), [(False, 1.009e-2, 3.92e-2), (True, 0.3126, 0.423)])
def test_a_pack_without_a_mask_has_the_tables_figures_and_is_called_a_leak(engine, restart, k3, mean):
    alone = engine.rows("fp32_raw__t1")
    leaked = behind_the_row_before(restart=restart)(engine, alone)
    assert figures(leaked)[1:3] == (pytest.approx(k3, rel=0.01), pytest.approx(mean, rel=0.01))
    # In a pack nothing comes before the first row; a second pass scores each row alone.
    packed = [
        replace(own, trainer=row.trainer if at else own.trainer)
        for at, (own, row) in enumerate(zip(alone, leaked, strict=True))
    ]
    verdict = verdict_of(packed, recorded_provenance(DATA / "fp32_raw__t1.json"), layout="packed")
    assert codes(verdict) == {"boundary-leak"}


def test_a_pack_with_positions_of_its_own_and_a_mask_is_sound(engine):
    alone = engine.rows("fp32_raw__t1")
    rows = []
    for row, other in zip(alone, [alone[-1], *alone[:-1]], strict=True):
        before = other.prompt + other.ids
        positions = [*range(len(before)), *range(len(row.prompt + row.ids))]
        # Without a mask or a cache the model reads the boundaries from the positions.
        rows.append(engine.row(row.prompt, row.ids, row.inference, before=before, positions=positions))
    assert figures(rows)[1] < 1e-11
    verdict = verdict_of(rows, recorded_provenance(DATA / "fp32_raw__t1.json"), layout="packed")
    assert (codes(verdict), verdict.judged) == (set(), True)


@pytest.mark.parametrize(
    ("name", "scored_at", "k3", "mean", "code", "words"),
    [
        (
            "fp32_processed__t07",
            1.0,
            1.855e-2,
            6.09e-2,
            "temperature-mismatch",
            "temperature 0.7, where 1 is",
        ),
        (
            "fp32_processed__t13",
            1.0,
            4.147e-2,
            1.31e-1,
            "temperature-mismatch",
            "temperature 1.3, where 1 is",
        ),
        ("fp32_raw__t07", 0.7, 1.291e-2, 6.09e-2, "temperature-mismatch", "temperature 1, where 0.7 is"),
        ("bf16_processed__t07", 1.0, 1.838e-2, 6.06e-2, "temperature-mismatch", "temperature 0.7"),
        ("fp32_processed__t1_topp08", 1.0, 4.005e-3, 4.69e-2, "truncation-renormalized", "top_p 0.8 "),
        ("fp32_processed__t1_topk20", 1.0, 8.465e-3, 3.57e-2, "truncation-renormalized", "top_k 20 "),
        ("fp32_processed__t07_topp08", 0.7, 2.535e-3, 3.02e-2, "truncation-renormalized", "top_p 0.8 "),
    ],
)
def test_what_nobody_stated_is_named_with_its_size(engine, name, scored_at, k3, mean, code, words):
    rows = engine.rows(name, divisor=scored_at)
    assert figures(rows)[1:3] == (pytest.approx(k3, rel=0.01), pytest.approx(mean, rel=0.01))
    stated = SamplingParams(temperature=scored_at)
    how = provenance(logprobs_mode="processed", sampling=stated, vocab_size=1536)
    (found,) = verdict_of(rows, how).findings
    assert found.code == code
    assert words in found.found


@pytest.mark.parametrize(
    ("scale", "k3"), [(0.0001, 4.992e-9), (0.001, 4.718e-7), (0.01, 5.189e-5), (0.03, 4.809e-4)]
)
def test_weights_that_are_a_little_off_are_silent(engine, scale, k3):
    moved = copy.deepcopy(engine.model)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.add_(scale * weight.std() * torch.randn(weight.shape, generator=chance))
    rows = Engine(moved).rows("fp32_raw__t1")
    # Other noise than the table's, of the same size.
    assert k3 / 3 < figures(rows)[1] < 3 * k3
    assert codes(verdict_of(rows, recorded_provenance(DATA / "fp32_raw__t1.json"))) == set()


@pytest.mark.parametrize(
    ("num_steps", "rate", "k3"),
    [(1, 1e-5, 3.431e-4), (1, 1e-4, 5.790e-3), (1, 1e-3, 0.3074), (8, 1e-4, 0.6513)],
)
def test_a_trainer_that_is_steps_ahead_has_drifted_and_no_other_cause_is_named(engine, num_steps, rate, k3):
    ahead = copy.deepcopy(engine.model)
    rows = engine.rows("fp32_raw__t1")
    optimizer = torch.optim.Adam(ahead.parameters(), lr=rate)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for row in rows[:16]:
            logits = ahead(torch.tensor([row.prompt + row.ids]), use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[len(row.prompt) - 1 : -1], torch.tensor(row.ids))
            (len(row.ids) * loss).backward()
        optimizer.step()
    drifted = Engine(ahead).rows("fp32_raw__t1")
    # The table does not say what the steps were on: the size is no more than alike.
    assert figures(drifted)[1] > k3 / 3
    said = codes(verdict_of(drifted, recorded_provenance(DATA / "fp32_raw__t1.json")))
    assert said <= {"ratio-tail", *NAMELESS}
