"""The predictions of benchmarks: of steps timed by known rates they are right, and none that is asked for is fitted."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness.execution_bench import LINKS, SIZES, SLOTS
from benchmarks.harness.step_prediction import (
    FITTED,
    STAGES,
    TimedStep,
    predict_ratios,
    predict_seconds,
    processes_config,
)
from foreroute.plan import PlanOptions, Topology
from foreroute.planner import plan
from foreroute.simulate.fit import predict
from foreroute.simulate.measurements import Measurement

RATES = {"gemm_flops_per_s": 5e10, "memory_bytes_per_s": 8e9, "layer_s": 2e-3}


def steps(config, *, seed):
    """Eight steps of two ranks, of other skews and sizes, planned and at home, timed by a machine with `RATES`."""
    rng, topology = np.random.default_rng(seed), Topology(2, 2, SLOTS, LINKS)
    costs = config.described().costs
    links = replace(costs.hardware.links, node_bytes_per_s=9e8)
    costs = replace(costs, hardware=replace(costs.hardware, links=links, **RATES))
    found = []
    for number in range(4):
        shares = rng.dirichlet(np.full(SIZES["num_experts"], 0.3 + number))
        counts = rng.multinomial(512 * (1 + number), shares, (2, SIZES["num_hidden_layers"], 2)).astype(np.int32)
        for options in (PlanOptions(slots="shared"), PlanOptions(replicas=False)):
            one = TimedStep(f"{seed}-{number}", counts, plan(counts, topology, options))
            seconds = {
                stage: predict([Measurement.of("", counts, one.plan, topology, stage, 1.0)], config, costs).item()
                for stage in STAGES
            }
            found.append(one._replace(seconds=seconds))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_steps_are_predicted_from_others(stage):
    config = processes_config(SIZES, 2, sequence_tokens=64)
    known, asked = steps(config, seed=0), steps(config, seed=1)
    untimed = [one._replace(seconds={}) for one in asked]
    predicted = predict_seconds(known, untimed, stage, config)
    assert predicted == pytest.approx([one.seconds[stage] for one in asked], rel=1e-3)
    assert np.ptp(predicted) > 0.5 * predicted.mean()
    assert len(FITTED) < len(known)


def test_planned_steps_over_those_at_home_are_predicted_as_megatron_executes_them():
    config = processes_config(SIZES, 2, sequence_tokens=64, head_width=128, executor="megatron")
    known, asked = steps(config, seed=0), steps(config, seed=1)
    untimed = {str(i): [one._replace(seconds={}) for one in asked[i : i + 2]] for i in range(0, len(asked), 2)}
    ratios = predict_ratios(known, untimed, config)
    for stage in STAGES:
        wanted = [a.seconds[stage] / b.seconds[stage] for a, b in zip(asked[::2], asked[1::2], strict=True)]
        assert list(ratios[stage].values()) == pytest.approx(wanted, rel=1e-3)
        assert np.ptp(wanted) > 0.01
    by_host = processes_config(SIZES, 2, sequence_tokens=64, head_width=128)
    assert ratios["update"] != predict_ratios(known, untimed, by_host)["update"]


@pytest.mark.parametrize("stage", STAGES)
def test_the_rate_of_host_memory_is_left_out_where_no_known_step_waits_for_it(stage):
    config = processes_config(SIZES, 2, sequence_tokens=64)
    known, asked = (steps(config, seed=seed)[1::2] for seed in (0, 1))  # at home
    predicted = predict_seconds(known + asked, asked, stage, config)
    assert predicted == pytest.approx([one.seconds[stage] for one in asked], rel=1e-3)


def test_where_ranks_share_processors_they_take_turns(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert processes_config(SIZES, 4, sequence_tokens=64).cluster.processors_per_node == 2
