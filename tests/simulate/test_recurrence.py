"""The recurrence against a play of events, by hand, and what must hold of any schedule."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreroute.costs.model import PASSES
from foreroute.simulate.engine import PARTS, run
from tests.simulate.event_oracle import play
from tests.simulate.simulate_cases import random_work, rules


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    pass_index=st.integers(0, 1),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)),
    transfers=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    gradients=st.sampled_from([0.0, 1.0, 6.0]),
    planned=st.sampled_from([0.0, 1.5]),
    prefetch=st.sampled_from([0, 1, 2, 3, 9]),
    keeps=st.booleans(),
)
@example(
    seed=0, pass_index=1, shape=(3, 3, 2), transfers=1.0, gradients=1.0, planned=0.0, prefetch=3, keeps=True
)  # fetches for the way forward wait for slots of the way back
def test_equals_a_play_of_events(seed, pass_index, shape, transfers, gradients, planned, prefetch, keeps):
    micro_steps, layers, ranks = shape
    work = random_work(seed, micro_steps=micro_steps, layers=layers, ranks=ranks, transfers=transfers)
    # many gradients are still on their way when all else has ended
    work = work._replace(gradient_MLG4=work.gradient_MLG4 * (0.0 if pass_index == 0 else gradients))
    how = rules(prefetch=prefetch, keeps_slots=keeps)
    found = run(work, how, pass_index=pass_index, ready_s=planned)
    expected = play(work, how, PASSES[pass_index], planned)
    assert found.end_s == pytest.approx(expected, abs=1e-9)
    assert found.parts_X.sum() == pytest.approx(found.end_s)


def one_cell(leg_s):
    """A cell whose attention and experts take 1 each, and its all-to-alls this long; nothing is moved."""
    work = random_work(0, micro_steps=1, layers=1)
    ones = {name: np.ones_like(getattr(work, name)) for name in ("attention_MG2", "experts_MLG2")}
    legs = {"all_to_all_ML": np.array([[leg_s]]), "head_MG": np.zeros_like(work.head_MG), "layer_s": 0.0}
    return work._replace(**ones, **legs).without_transfers()


@pytest.mark.parametrize(
    ("overlap", "expected"),
    # two all-to-alls of 0.75
    [(0.0, 3.5), (0.25, 3.0), (0.75, 2.0), (1.0, 2.0)],
)
def test_overlap_hides_all_to_alls_behind_its_share_of_computing(overlap, expected):
    assert run(one_cell(0.75), rules(overlap=overlap), pass_index=0).end_s == pytest.approx(expected)


def test_fetches_share_the_links_with_all_to_alls_that_are_hidden():
    """Computing of 1 + 1 hides 0.75 of all-to-alls, so links have 5/8 of it left: 0.5 takes 0.8 of the experts."""
    work = one_cell(0.375)
    work.direct_KMLG4[0, 0, 0, 1, 2] = 0.5
    found = run(work, rules(overlap=1.0), pass_index=0)
    assert found.end_s == pytest.approx(1 + 0.8 + 1)


FASTER = ("all_to_all_ML", "experts_MLG2", "attention_MG2", "host_KMLG", "direct_KMLG4", "gradient_MLG4")


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(FASTER),
    factor=st.floats(0.0, 0.99),
    rule=st.fixed_dictionaries(
        {"prefetch": st.integers(0, 3), "keeps_slots": st.booleans(), "overlap": st.sampled_from([0.0, 0.3, 1.0])}
    ),
)
def test_faster_links_and_ranks_never_slow_a_step(seed, name, factor, rule):
    work = random_work(seed)
    slow = run(work, rules(**rule), pass_index=1)
    quick = run(work._replace(**{name: factor * getattr(work, name)}), rules(**rule), pass_index=1)
    assert quick.end_s <= slow.end_s + 1e-9


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), keeps=st.booleans(), prefetch=st.integers(0, 3))
def test_every_resource_does_exactly_its_work(seed, keeps, prefetch):
    work = random_work(seed)
    found = run(work, rules(keeps_slots=keeps, prefetch=prefetch), pass_index=1)
    copied_G = np.diff(found.fetched_NG2, axis=2)[..., 0].sum(axis=0)
    assert copied_G == pytest.approx(work.host_KMLG.sum(axis=(0, 1, 2)))
    busy_s = {"experts": 0.0, "attention": 0.0}
    for m, layer in np.ndindex(3, 4):
        busy_s["experts"] += 2 * work.experts_MLG2[m, layer, :, 0].max() + work.experts_MLG2[m, layer, :, 1].max()
        busy_s["attention"] += 2 * work.attention_MG2[m, :, 0].max() + work.attention_MG2[m, :, 1].max()
    for name, seconds in busy_s.items():
        assert found.parts_X[PARTS.index(name)] == pytest.approx(seconds)
    assert found.parts_X[PARTS.index("all-to-all")] == pytest.approx(6 * work.all_to_all_ML.sum())
    for g in range(2):  # copies of a rank never overlap
        used = found.fetched_NG2[:, g][found.fetched_NG2[:, g, 1] > 0]
        assert (used[1:, 0] >= used[:-1, 1] - 1e-9).all()
    assert (found.fetched_NG2 >= 0).all()
