"""Fitting finds the rates that made the measurements, and says what cannot be; files of measurements are checked."""

import json
from dataclasses import replace

import numpy as np
import pytest

from foreroute.errors import ConfigError, CountsError
from foreroute.plan import PlanOptions, save_counts, save_plan
from foreroute.planner import plan
from foreroute.simulate import parse_config
from foreroute.simulate.fit import Measurement, fit, load_measurements, predict
from tests.simulate.simulate_cases import small_config, small_values

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
        measured.append(Measurement.of(f"step {number}", counts.astype(np.int32), found, topology, stage, 1.0))
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
    planned, at_home = load_measurements(folder / "m.jsonl", small_config().described().topology)
    assert (planned.pass_index, planned.seconds) == (1, 0.5)
    assert (at_home.pass_index, at_home.seconds, at_home.name) == (0, 0.25, "counts.safetensors, recompute")
    assert len(at_home.served.passes[0].expert_R) == 0 < len(planned.served.passes[0].expert_R)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (line() + "\n{", ConfigError, "line 2 is not JSON"),
        ("x" * (1 << 21), ConfigError, "1048576 at most"),
        (line(seconds=0), ConfigError, "line 1 is not valid:\n  seconds"),
        (line() + "\n" + line(plan="other.safetensors"), CountsError, "line 2: "),
    ],
)
def test_bad_measurements_are_refused_with_their_number(folder, text, error, message):
    (folder / "m.jsonl").write_text(text)
    with pytest.raises(error, match=message):
        load_measurements(folder / "m.jsonl", small_config().described().topology)
