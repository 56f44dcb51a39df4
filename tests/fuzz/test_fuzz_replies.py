"""A few thousand damaged replies in every test run; `fuzz_run.py` makes as many as it is asked for."""

import copy
import random
from collections import Counter
from functools import cache

import pytest
from fuzz_mutations import KINDS, mutant
from fuzz_reader import UnsaidError, says
from fuzz_run import FooledError, fuzz, judge, judged, parse, readable
from fuzz_seeds import Seed, all_seeds
from hypothesis import given, settings
from hypothesis import strategies as st

NUM_MUTANTS = 6_000


@cache
def readable_seeds() -> list[Seed]:
    return readable(all_seeds())


@pytest.fixture(scope="module")
def seeds():
    return readable_seeds()


@pytest.fixture(scope="module")
def outcome(seeds):
    return fuzz(seeds, NUM_MUTANTS, random_seed=1)


def test_the_seeds_are_of_every_engine_whole_and_streamed(seeds):
    forms = Counter((seed.engine, seed.streamed) for seed in seeds)
    assert set(forms) == {
        (engine, streamed) for engine in ("vllm", "sglang", "fireworks") for streamed in (0, 1)
    }
    assert forms["vllm", False] >= 95


def test_no_mutant_is_misread_and_no_foreign_error_escapes(outcome):
    _, failures = outcome
    assert failures == []


def test_every_kind_of_damage_is_survived_and_refused_in_every_form(outcome):
    counts, _ = outcome
    assert sum(counts.values()) == NUM_MUTANTS
    forms = {form for form, _, _ in counts}
    assert len(forms) == 6
    for kind in KINDS:
        by_outcome = Counter(
            {each: sum(counts[form, kind, each] for form in forms) for each in ("accepted", "refused")}
        )
        assert min(by_outcome.values()) > 0, kind
    # A stream may lose the line ends after its last event, nothing else.
    assert all(counts[form, "cut", "accepted"] == 0 for form in forms if "stream" not in form)


def test_a_repeated_chunk_is_refused_at_every_place_of_every_stream(seeds):
    streams = {seed.name: seed for seed in seeds if seed.streamed}
    assert len(streams) >= 11
    for seed in streams.values():
        for at, event in enumerate(seed.tree):
            repeated = [*seed.tree[: at + 1], copy.deepcopy(event), *seed.tree[at + 1 :]]
            assert judge(seed, repeated) == "refused", (seed.name, at)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    which=st.integers(0, 10**6),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=5),
    random_seed=st.integers(0, 10**6),
)
def test_several_damages_at_once_are_read_as_they_stand_or_refused(which, kinds, random_seed):
    # Not the fixture: hypothesis would print it.
    seeds = readable_seeds()
    seed, rng = seeds[which % len(seeds)], random.Random(random_seed)
    tree = seed.tree
    for kind in kinds:
        if tree:
            tree, _ = mutant(tree, kind, rng)
    assert judge(seed, tree, as_bytes=bool(random_seed % 2)) in ("accepted", "refused")


# The judge must be able to fail: each of these is a parser that was fooled.


def test_the_judge_notices_another_id_logprob_or_number_of_choices(seeds):
    seed = next(each for each in seeds if each.name.endswith("completions_n2_t1.json"))
    turns = parse(seed, seed.tree, as_bytes=False)
    said = says(seed.engine, seed.tree, seed.request)
    assert judged(turns, said) == "accepted"
    for wrong in (
        [said[0], said[1]._replace(ids=[1, *said[1].ids[1:]])],
        [said[0]._replace(logprobs=[-9.0, *said[0].logprobs[1:]]), said[1]],
        [said[0]._replace(prompt=said[0].prompt[1:]), said[1]],
        said[:1],
    ):
        with pytest.raises(FooledError):
            judged(turns, wrong)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "fireworks"])
def test_the_reader_calls_uneven_lists_and_wrong_counts_contradictions(seeds, engine):
    seed = next(each for each in seeds if each.engine == engine and not each.streamed)
    ids = {
        "vllm": ("choices", 0, "token_ids"),
        "fireworks": ("choices", 0, "token_ids"),
        "sglang": ("output_ids",),
    }
    rng = random.Random(0)
    for _ in range(2_000):
        tree, path = mutant(seed.tree, "drop", rng)
        if path[:-1] == ids[engine]:
            break
    with pytest.raises(UnsaidError):
        says(engine, tree, seed.request)
    assert judge(seed, tree) == "refused"
