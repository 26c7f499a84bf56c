"""The predictions of benchmarks: of steps timed by known rates they are right, and none that is asked for is fitted."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness.spread_bench import LINKS, SIZES, SLOTS
from benchmarks.harness.step_prediction import (
    PASSES,
    RATES,
    TimedStep,
    in_turns,
    predict_seconds,
    processes_config,
    seconds_on_processes,
    without_overlap,
)
from foreroute.plan import PlanOptions, Topology
from foreroute.planner import plan
from foreroute.simulate.engine import PARTS, run
from foreroute.simulate.fit import Measurement, predict
from tests.simulate.simulate_cases import random_work, rules
from tests.tiers import grid

TRUE_RATES = {"gemm_flops_per_s": 5e10, "memory_bytes_per_s": 8e9, "layer_s": 2e-3}


def steps(config, *, seed):
    """Eight steps of two ranks, of other skews and sizes, planned and at home, timed by a machine with `TRUE_RATES`."""
    rng, topology = np.random.default_rng(seed), Topology(2, 2, SLOTS, LINKS)
    costs = config.described().costs
    links = replace(costs.hardware.links, node_bytes_per_s=9e8)
    costs = replace(costs, hardware=replace(costs.hardware, links=links, **TRUE_RATES))
    found = []
    for number in range(4):
        shares = rng.dirichlet(np.full(SIZES.experts, 0.3 + number))
        counts = rng.multinomial(512 * (1 + number), shares, (2, SIZES.layers, 2)).astype(np.int32)
        for options in (PlanOptions(slots="shared"), PlanOptions(replicas=False)):
            one = TimedStep(f"{seed}-{number}", counts, plan(counts, topology, options))
            seconds = {
                pass_name: predict(
                    [Measurement.of("", counts, one.plan, topology, pass_name, 1.0)],
                    config,
                    costs,
                    seconds_on_processes,
                ).item()
                for pass_name in PASSES
            }
            found.append(one._replace(seconds=seconds))
    return found


@grid("pass_name", PASSES, quick=1)
def test_steps_are_predicted_from_others(pass_name):
    config = processes_config(SIZES, 2, slots=2, sequence_tokens=64)
    known, asked = steps(config, seed=0), steps(config, seed=1)
    untimed = [one._replace(seconds={}) for one in asked]
    predicted = predict_seconds(known, untimed, pass_name, config)
    assert predicted == pytest.approx([one.seconds[pass_name] for one in asked], rel=1e-3)
    assert np.ptp(predicted) > 0.5 * predicted.mean()
    assert len(RATES) + 1 < len(known)


@pytest.mark.parametrize("pass_index", [0, 1])
def test_without_copy_engines_what_a_rank_moves_takes_time_of_its_experts(pass_index):
    work = random_work(5)
    found = run(without_overlap(work), rules(), pass_index=pass_index)
    sums = np.zeros(2)
    for m in range(3):
        for layer in range(4):
            forward_G, backward_G = work.experts_MLG2[m, layer].T.copy()
            for kind, seconds_G in ((0, forward_G), (1, backward_G)):
                for g in range(2):
                    seconds_G[g] += work.host_KMLG[kind, m, layer, g] + work.direct_KMLG4[kind, m, layer, g].sum()
                    if kind:
                        # the forward anew of a backward pass has the fetch of the forward one
                        seconds_G[g] -= work.host_KMLG[0, m, layer, g] + work.direct_KMLG4[0, m, layer, g].sum()
                        seconds_G[g] += work.gradient_MLG4[m, layer, g].sum()
            sums += forward_G.max(), max(0.0, backward_G.max())
    experts = found.parts_X[PARTS.index("experts")]
    assert experts == pytest.approx(sums[0] if pass_index == 0 else 2 * sums[0] + sums[1])
    assert found.parts_X[PARTS.index("exposed transfers")] == 0


def test_ranks_that_share_processors_take_turns():
    """Works of 1, 2, 3 on two processors: all three run at 2/3 until 1.5, then two at full speed until 2.5 and 3.5."""
    work = random_work(0, micro_steps=1, layers=1, ranks=3)
    work = work._replace(
        attention_MG2=np.broadcast_to(np.array([2.0, 3.0, 1.0])[:, None], (1, 3, 2)),
        experts_MLG2=np.zeros_like(work.experts_MLG2),
        head_MG=np.zeros_like(work.head_MG),
        all_to_all_ML=np.zeros((1, 1)),
        layer_s=0.0,
    )
    found = in_turns(work, 2)
    assert found.attention_MG2.tolist() == [[[3.5, 3.5]] * 3]
    assert found.experts_MLG2.max() == found.head_MG.max() == 0
    assert in_turns(work, 3).attention_MG2.tolist() == [[[3.0, 3.0]] * 3]
