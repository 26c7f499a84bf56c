"""What a configuration may say, and what is said to one that is wrong."""

import re
import tomllib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import foreroute as fr
from foreroute.errors import ConfigError, InputError, TopologyError
from foreroute.layout import pack_sequences
from foreroute.simulate import parse_config, simulate
from foreroute.simulate.steps import group_steps
from foreroute.testing.routes import synthetic_trace
from tests.simulate.simulate_cases import FAST_LINKS, FREE_OF_ALL_BUT_ROWS, small_values
from tests.traces import spec_of

SMALLEST = {"cluster": {"gpus": 64, "expert_parallel": 16}}


def test_the_file_of_the_simulators_page_is_read():
    page = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    config = parse_config(tomllib.loads(text), source="page")
    assert (config.cluster.gpus, config.cluster.groups) == (8, 1)


FILE, TWELVE = {"counts": "c.safetensors"}, {"gpus": 12, "expert_parallel": 12}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"cluster": {"gpus": 60, "expert_parallel": 16}}, ConfigError, "60 GPUs.*groups of 16"),
        ({"cluster": {"gpus": 40, "expert_parallel": 40}}, ConfigError, "expert_parallel = 40"),
        ({"workload": {"preset": "G7"}}, ConfigError, "no workload is called 'G7'"),
        ({"workload": FILE | {"skew": 2.0, "seed": 1}}, ConfigError, "file, and seed, skew would draw"),
        ({"workload": FILE | {"traces": ["t.safetensors"]}}, ConfigError, "counts and traces"),
        ({"methods": ["our"]}, ConfigError, "no method called our"),
        ({"cluster": TWELVE}, TopologyError, "12 ranks.*nodes of 8"),
    ],
)
def test_wrong_configurations_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        parse_config(SMALLEST | change, source="here")


LENGTHS = [[300, 40, 200, 90], [120, 500, 60, 33, 250]]


@pytest.fixture
def of_traces(tmp_path):
    """A configuration whose tokens are those of two files, as a run leaves them, and the traces."""
    traces = [synthetic_trace(spec_of(num_layers=2), lengths, seed=n) for n, lengths in enumerate(LENGTHS)]
    paths = [str(fr.save(trace, tmp_path / f"{n}.safetensors")) for n, trace in enumerate(traces)]
    values = small_values() | {"workload": {"traces": paths, "tokens_per_rank": 512}}
    values |= {"hardware": FREE_OF_ALL_BUT_ROWS, "links": FAST_LINKS}
    return parse_config(values, source="here"), traces


def test_ones_own_traces_are_simulated(of_traces):
    config, traces = of_traces
    cluster = config.described()
    (step,) = group_steps(config, cluster.topology, cluster.costs)
    lengths = np.concatenate([trace.lengths for trace in traces])
    token_s, square_s = cluster.costs.attention_seconds(np.array([1, 0]), np.array([0, 1]))
    places = pack_sequences(lengths, 4, 512, square_cost=square_s / token_s)
    counts, squares = np.zeros_like(step.counts_MLGE), np.zeros_like(step.squares_MG)
    sequences = [trace.select([s]) for trace in traces for s in range(len(trace))]
    for m, g, sequence in zip(places.micro_step_S, places.rank_S, sequences, strict=True):
        squares[m, g] += sequence.num_rows**2
        for ids_LK in sequence.expert_ids_NLK[sequence.valid_N]:
            for layer, ids_K in enumerate(ids_LK):
                counts[m, layer, g, ids_K] += 1
    assert (step.counts_MLGE == counts).all()
    assert (step.squares_MG == squares).all()
    found = simulate(config)
    assert found["ours"].imbalance < found["static"].imbalance
    assert found.facts["workload"] == ", ".join(config.workload.traces)


CLUSTER = {"cluster": {"gpus": 64, "expert_parallel": 16}}
WIDE = {"num_experts": 32_768, "num_layers": 1000}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workload": {"micro_steps": 999_999}}, "would take about .* GB of memory; expected at most 2 GB"),
        ({"cluster": {"gpus": 1024, "expert_parallel": 1024}, "model": WIDE}, "would take about .* GB of memory"),
        ({"cluster": {"gpus": 64, "expert_parallel": 64, "redundant_slots": 2000}}, "redundant_slots"),
        ({"cluster": {"gpus": 2**40, "expert_parallel": 16}}, r"cluster\.gpus: .*less than or equal to 999999"),
        ({"workload": {"tokens_per_rank": 2**24}}, "assignments in a cell; expected 2147483647 at most"),
        ({"execution": {"rollout_s": 1e300}}, r"execution\.rollout_s"),
    ],
)
def test_what_would_take_too_much_is_refused_before_it_is_taken(values, message):
    usual = {"hardware": {"preset": "h100"}, "model": {"preset": "qwen3-30b-a3b"}, **CLUSTER}
    asked = {name: {**usual.get(name, {}), **values.get(name, {})} for name in {*usual, *values}}
    tracemalloc.start()
    with pytest.raises(InputError, match=message):
        simulate(parse_config(asked, source="here"))
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
