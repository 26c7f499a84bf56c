"""Measured rates: what is made of seconds, and `foreroute measure` on two processes."""

import os
import tomllib
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from foreroute.costs.cluster_file import load_cluster, parse_cluster
from foreroute.costs.pricing import step_parts
from foreroute.plan import PlanOptions
from foreroute.planner import plan
from foreroute.train.rates import MeasuredStep, fitted
from tests.cli.command import foreroute

FILE = """
topology = {num_ranks = 2, redundant_slots = 2}

[hardware]  # to begin with
gemm_flops_per_s = 1e10
attention_flops_per_s = 1e10
memory_bytes_per_s = 1e9
ranks_per_node = 2

[links]
node_bytes_per_s = 1e9
cluster_bytes_per_s = 1e9
host_bytes_per_s = 1e9
node_latency_s = 1e-4
cluster_latency_s = 1e-4

[costs]
paths = "host"

[model]
num_layers = 3
num_experts = 8
top_k = 2
hidden = 32
intermediate = 16
dense_parameters = 4096
attention_width = 64
vocabulary = 64
weight_bytes = 4.0
activation_bytes = 4.0
"""


def counts(skew):
    """As many assignments of every rank, whatever the skew."""
    return np.tile((np.linspace(1 + skew, 1 - skew, 8) * 2100).round().astype(np.int32), (2, 2, 2, 1))


def test_rates_are_those_by_which_the_model_takes_as_long():
    """Seconds are the cost model's own, with rates of which what is fitted is told nothing."""
    cluster = parse_cluster(tomllib.loads(FILE), source="here")
    topology, known = cluster.topology, cluster.costs.hardware
    truth = replace(
        known,
        gemm_flops_per_s=3.1e10,
        backward_products=2.4,
        layer_s=2e-3,
        replica_s=4e-3,
        replica_backward_s=7e-3,
        tile_rows=1,
    )
    costs = replace(cluster.costs, hardware=replace(known, tile_rows=1))
    options = (PlanOptions(replicas=False), PlanOptions(replicas=False), PlanOptions(tolerance=0.0))
    steps = [
        MeasuredStep([], [], counts(skew), plan(counts(skew), topology, each))
        for skew, each in zip((0.0, 0.5, 0.5), options, strict=True)
    ]
    assert len(steps[2].plan.hosts.expert_R)
    seconds = [
        step_parts(step.plan.hosts, step.counts_MLGE, topology, replace(costs, hardware=truth)).sum(axis=1)
        for step in steps
    ]
    found = fitted(costs, steps, np.stack(seconds))
    for name in ("gemm_flops_per_s", "backward_products", "layer_s", "replica_s", "replica_backward_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6), name
    # a control: seconds of a replica that are not there are not found
    without = fitted(costs, steps, np.stack([*seconds[:2], seconds[2] * 0.5]))
    assert (without.replica_s, without.replica_backward_s) == (0.0, 0.0)


def measure(rank, path):
    """As torchrun runs the command, in the group that is there."""
    with (
        patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": "2"}),
        patch("foreroute.train.rates.ROUNDS", 1),
        patch("foreroute.train.rates.MESSAGE", 1 << 12),
    ):
        return foreroute("measure", path, "--token-budget", "256").stdout


@pytest.mark.slow
def test_two_processes_measure_into_the_file(workers, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    before = load_cluster(path)
    printed, other_printed = workers(2).run(measure, path)
    assert other_printed == ""
    assert str(path) in printed
    after = load_cluster(path)
    assert after.costs.model == before.costs.model
    assert (after.topology.num_ranks, after.topology.redundant_slots) == (2, 2)
    assert "[hardware]  # to begin with" in path.read_text()
    hardware, links = after.costs.hardware, after.topology.links
    for name in ("gemm_flops_per_s", "layer_s", "tile_rows", "publish_bytes_per_s"):
        assert getattr(hardware, name) != getattr(before.costs.hardware, name), name
    assert links.cluster_bytes_per_s == 1e9, "no other node is there to measure it with"
    assert "cluster_bytes_per_s = 1e9\n" in path.read_text(), "nor is it called measured"
    assert links.node_bytes_per_s != 1e9
    assert min(after.costs.begin_s, after.costs.plan_s_per_count) > 0
    found = plan(counts(0.5), after.topology, costs=after.costs)
    assert found.gains.keys() == {"recompute", "update"}


def test_one_process_measures_nothing(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "cluster.toml").write_text(FILE)
    assert "torchrun --nproc-per-node 2" in foreroute("measure", tmp_path / "cluster.toml", code=2).stderr
