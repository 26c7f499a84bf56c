"""What a configuration may say, and files of measurements; fitting finds the rates that made them."""

import json
import re
import tomllib
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import foreroute as fr
from foreroute.errors import ConfigError, CountsError, InputError, TopologyError
from foreroute.layout import pack_sequences
from foreroute.plan import PlanOptions, save_counts, save_plan
from foreroute.planner import plan
from foreroute.simulate import parse_config, simulate
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.fit import Measurement, fit, load_measurements, predict
from foreroute.simulate.steps import group_steps
from foreroute.testing.routes import synthetic_trace
from tests.simulate.simulate_cases import FAST_LINKS, FREE_OF_ALL_BUT_ROWS, small_config, small_values
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
        ({"workload": {"preset": "G7"}}, ConfigError, r"no workload.*'G7'"),
        ({"workload": FILE | {"skew": 2.0, "seed": 1}}, ConfigError, r"file, .*seed, skew"),
        ({"workload": FILE | {"traces": ["t.safetensors"]}}, ConfigError, r"counts and.*traces"),
        ({"methods": ["our"]}, ConfigError, r"no method.*our"),
        ({"cluster": TWELVE}, TopologyError, "12 ranks.*nodes of 8"),
    ],
)
def test_wrong_configurations_are_refused(change, error, words):
    with pytest.raises(error, match=words) as told:
        parse_config(SMALLEST | change, source="here")
    assert "Value error" not in str(told.value)  # pydantic's own words


def test_ones_own_traces_are_simulated(tmp_path):
    """Of two files, as a run leaves them."""
    every = [[300, 40, 200, 90], [120, 500, 60, 33, 250]]
    traces = [synthetic_trace(spec_of(num_layers=2), lengths, seed=n) for n, lengths in enumerate(every)]
    paths = [str(fr.save(trace, tmp_path / f"{n}.safetensors")) for n, trace in enumerate(traces)]
    values = small_values() | {"workload": {"traces": paths, "tokens_per_rank": 512}}
    values |= {"hardware": FREE_OF_ALL_BUT_ROWS, "links": FAST_LINKS}
    config = parse_config(values, source="here")
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
    assert found["foreroute"].imbalance < found["static"].imbalance
    assert found.facts["workload"] == ", ".join(config.workload.traces)


@pytest.mark.parametrize(
    ("workload", "error", "words"),
    [
        ({"counts": "odd"}, CountsError, "micro-step 0.*top_k 2"),
        ({"counts": "trace"}, CountsError, "trace"),
        ({"traces": ["even"]}, InputError, "even"),
        ({"counts": "wide"}, ConfigError, "top-2 of 8 .*wide has 2 .*of 16"),
        ({"counts": "even", "previous_counts": "wide"}, CountsError, "wide .*same model"),
    ],
)
def test_files_that_are_no_step_of_the_model_are_refused(tmp_path, monkeypatch, workload, error, words):
    monkeypatch.chdir(tmp_path)
    fr.save(synthetic_trace(spec_of(num_layers=2), [20, 30], seed=0), "trace")
    even = np.full((1, 2, 4, 8), 2)
    for name, counts in (("even", even), ("odd", even + (np.arange(8) == 3)), ("wide", even.repeat(2, axis=3))):
        save_counts(counts, name)
    with pytest.raises(error, match=words):
        simulate(parse_config(small_values() | {"workload": workload}, source="here"))


WIDE = {"num_experts": 32_768, "num_layers": 1000}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workload": {"micro_steps": 999_999}}, r"take about .* GB.*most 2 GB"),
        ({"cluster": {"gpus": 1024, "expert_parallel": 1024}, "model": WIDE}, r"take about .* GB.*memory"),
        ({"cluster": {"gpus": 64, "expert_parallel": 64, "redundant_slots": 2000}}, "redundant_slots"),
        ({"cluster": {"gpus": 2**40, "expert_parallel": 16}}, r"cluster\.gpus: .*999999"),
        ({"workload": {"tokens_per_rank": 2**24}}, "assignments in a cell; expected 2147483647 at most"),
        ({"execution": {"rollout_s": 1e300}}, r"execution\.rollout_s"),
    ],
)
def test_what_would_take_too_much_is_refused_before_it_is_taken(values, message):
    usual = {"hardware": {"preset": "h100"}, "model": {"preset": "qwen3-30b-a3b"}, **SMALLEST}
    asked = {name: {**usual.get(name, {}), **values.get(name, {})} for name in {*usual, *values}}
    tracemalloc.start()
    with pytest.raises(InputError, match=message):
        simulate(parse_config(asked, source="here"))
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


RATES = {"gemm_flops_per_s": 3e14, "layer_s": 90e-6, "node_bytes_per_s": 1e11, "replica_s": 2e-4}


def steps(config, rates=RATES):
    """Twelve steps of other sizes and skews, planned or not, timed by a cluster with these rates."""
    rng, costs, measured = np.random.default_rng(0), config.described().costs, []
    links = replace(costs.hardware.links, node_bytes_per_s=rates["node_bytes_per_s"])
    own = {name: value for name, value in rates.items() if name != "node_bytes_per_s"}
    costs, topology = replace(costs, hardware=replace(costs.hardware, links=links, **own)), config.described().topology
    for number in range(12):
        counts = rng.multinomial(400 * (1 + number % 4), rng.dirichlet(np.full(8, 0.5 + number % 3)), (2, 4, 4))
        found = plan(counts.astype(np.int32), topology, PlanOptions(slots="shared")) if number % 2 else None
        stage = "update" if number % 3 else "recompute"
        step = BalancerInput(counts.astype(np.int32), topology, topology.contiguous_home_LE(4, 8))
        measured.append(Measurement.of(f"step {number}", step, found, stage, 1.0))
    seconds = predict(measured, config, costs)
    return [replace(one, seconds=float(s)) for one, s in zip(measured, seconds, strict=True)]


def test_rates_that_made_the_measurements_are_found():
    config = parse_config(small_values() | {"hardware": {"preset": "h100", "replica_s": 1e-3}}, source="the test")
    found = fit(steps(config), config, tuple(RATES))
    assert found.parameters == pytest.approx(RATES, rel=1e-3)
    assert found.worst_error < 1e-4
    seconds = np.array([one.seconds for one in steps(config)])
    assert np.median(np.abs(predict(steps(config), config, config.described().costs) / seconds - 1)) > 0.1


@pytest.fixture
def folder(tmp_path):
    """Counts, their plan, and the plan of other counts."""
    rng, topology = np.random.default_rng(0), small_config().described().topology
    counts, others = (rng.integers(0, 50, (2, 4, 4, 8)).astype(np.int32) for _ in range(2))
    save_counts(counts, tmp_path / "counts.safetensors")
    save_plan(plan(counts, topology), tmp_path / "plan.safetensors")
    save_plan(plan(others, topology), tmp_path / "other.safetensors")
    return tmp_path


def line(**changes):
    values = {"counts": "counts.safetensors", "plan": "plan.safetensors", "pass_name": "update", "seconds": 0.5}
    return json.dumps(values | changes)


def test_measurements_are_read_from_lines(folder):
    (folder / "m.jsonl").write_text(f"{line()}\n\n{line(plan=None, pass_name='recompute', seconds=0.25)}\n")
    planned, at_home = load_measurements(folder / "m.jsonl", small_config().described())
    assert (planned.pass_index, planned.seconds) == (1, 0.5)
    assert (at_home.pass_index, at_home.seconds, at_home.name) == (0, 0.25, "counts.safetensors, recompute")
    assert len(at_home.served.passes[0].expert_R) == 0 < len(planned.served.passes[0].expert_R)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (line() + "\n{", ConfigError, r"line 2.*not JSON"),
        ("x" * (1 << 21), ConfigError, "1048576 at most"),
        (line(seconds=0), ConfigError, "line 1.*not valid:\n  seconds"),
        (line() + "\n" + line(plan="other.safetensors"), CountsError, "line 2: "),
    ],
)
def test_bad_measurements_are_refused_with_their_number(folder, text, error, message):
    (folder / "m.jsonl").write_text(text)
    with pytest.raises(error, match=message):
        load_measurements(folder / "m.jsonl", small_config().described())
