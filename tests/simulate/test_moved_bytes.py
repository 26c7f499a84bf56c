"""What a GPU sends in a step, against counting every row and every replica."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness.planner_oracles import CellHosts
from foreroute.simulate import parse_config, simulate
from foreroute.simulate.ep_group import EPGroup
from foreroute.simulate.methods import METHODS, serve
from foreroute.simulate.optimizer_step import reduction_bytes
from foreroute.simulate.steps import group_steps

RANKS, NODE, LAYERS = 16, 8, 3


def config_of(method, paths="host"):
    return parse_config(
        {
            "cluster": {"gpus": 32, "expert_parallel": RANKS, "redundant_slots": 2},
            "hardware": {"preset": "h100"},
            "model": {"preset": "qwen3-30b-a3b"},
            "costs": {"dispatcher": "copies", "paths": paths, "prefetch": 0},
            "workload": {"tokens_per_rank": 1024, "micro_steps": 2, "layers": LAYERS},
            "methods": ["static", method],
        },
        source="the test",
    )


@pytest.mark.parametrize(("paths", "slots"), [("host", "shared"), ("direct", "layer")])
def test_rows_and_replicas_are_those_that_counting_finds(paths, slots, monkeypatch):
    preset = METHODS["ours_traffic"]
    options = replace(preset.method.options, slots=slots, pay_off=False)  # so that both passes run by the plan
    monkeypatch.setitem(METHODS, "ours_traffic", replace(preset, method=replace(preset.method, options=options)))
    config = config_of("ours_traffic", paths)
    cluster = config.described()
    record = simulate(config)
    totals = []
    for step in group_steps(config, cluster.topology, cluster.costs):
        planned = serve(METHODS["ours_traffic"], step, cluster.costs)
        assert planned.slots == slots
        rows, weights, gradients = np.zeros(2), np.zeros(3), np.zeros(2)
        for m, layer in np.ndindex(step.counts_MLGE.shape[:2]):
            one = CellHosts.of(planned.passes[1].cell(m, layer), step.counts_MLGE[m, layer])
            times = sum(model_layer % LAYERS == layer for model_layer in range(48))
            hosts = zip(one.expert_H, one.rank_H, one.tokens_HG, one.fetched_H, strict=True)
            for expert, host, tokens_G, fetched in hosts:
                for source, tokens in enumerate(tokens_G):
                    if source != host:
                        rows[int(source // NODE != host // NODE)] += times * tokens
                home = planned.home_LE[layer, expert]
                if host == home:
                    continue
                far = int(host // NODE != home // NODE)
                # recompute, forward, and backward, which finds replicas in slots of their own or of the last layer
                fetches = 2 * times * fetched if slots == "layer" else 3 * times - (layer == 47 % LAYERS)
                weights[0 if paths == "host" and not far else 1 + far] += fetches
                gradients[far] += times
        found = EPGroup.of(planned, step, cluster.costs, overlap=0.0).moved_bytes()
        assert weights.any()
        assert gradients.any()
        expected = {
            "rows": dict(zip(("node", "cluster"), rows * 8 * 2048 * 2 / RANKS, strict=True)),
            "weights of replicas": dict(
                zip(("host", "node", "cluster"), weights * 3 * 2048 * 768 * 2 / RANKS, strict=True)
            ),
            "gradients of replicas": dict(
                zip(("node", "cluster"), gradients * 3 * 2048 * 768 * 4 / RANKS, strict=True)
            ),
        }
        for what, by_link in expected.items():
            assert found[what] == pytest.approx(by_link), what
        totals.append(expected)
    for what, by_link in totals[0].items():
        for link in by_link:
            mean = np.mean([each[what][link] for each in totals])
            assert record["ours_traffic"].moved_bytes[what][link] == pytest.approx(mean)
    static = record["static"].moved_bytes
    assert not any(static["weights of replicas"].values())
    assert not any(static["gradients of replicas"].values())
    reduced = reduction_bytes(config.cluster, cluster.topology, cluster.costs)
    assert static["gradients and weights of data parallelism"] == reduced
