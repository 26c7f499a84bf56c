"""`foreroute simulate` as a user meets it."""

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from foreroute.costs.cluster_file import load_cluster
from foreroute.plan import save_counts
from foreroute.simulate import load_config, parse_config
from foreroute.simulate.fit import fit, load_measurements
from tests.cli.command import foreroute, refused
from tests.simulate.simulate_cases import small_values
from tests.tiers import grid

EXAMPLES = Path(__file__).parents[2] / "examples" / "simulate"
TOML = tomli_w.dumps(small_values(gpus=8, methods=["eplb_micro_step", "foreroute"], planning_s=0.25))


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.toml").write_text(TOML)
    return lambda *arguments, cwd=tmp_path: foreroute("simulate", *arguments, cwd=cwd, columns=80)


def measure(folder):
    """Two timed steps, as a user would write them down."""
    for number, count in enumerate((100, 400)):
        save_counts(np.full((2, 4, 4, 8), count, np.int32), folder / f"counts-{number}.safetensors")
    lines = [
        {"counts": f"counts-{number}.safetensors", "plan": None, "pass_name": "recompute", "seconds": seconds}
        for number, seconds in enumerate((0.004, 0.011))
    ]
    (folder / "measured.jsonl").write_text("\n".join(json.dumps(line) for line in lines))


def test_configuration_to_table_figures_and_page(run, tmp_path):
    result = run("config.toml")
    folder = tmp_path / "runs" / "simulate" / "config"
    assert {path.name for path in folder.iterdir()} == {"cluster.toml", "config.json", "report.html", "simulation.json"}
    figures = json.loads((folder / "simulation.json").read_text())
    assert [method["name"] for method in figures["methods"]] == ["static", "eplb_micro_step", "foreroute"]
    table = result.stdout.partition("\nBy the cost model")[0].splitlines()
    for method in figures["methods"]:
        (line,) = [line for line in table if line.startswith(f"{method['label']} ")]
        assert f"{method['speedup_over_static']:.2f}\N{MULTIPLICATION SIGN}" in line.split()
    assert "Speedups leave out the wait for the plan, home moves and publishing" in result.said
    assert max(len(line) for line in result.stdout.splitlines() if "runs/simulate" not in line) <= 80
    resolved = parse_config(tomllib.loads(TOML), source="the test")
    assert json.loads((folder / "config.json").read_text()) == resolved.model_dump(mode="json")
    page = (folder / "report.html").read_text()
    assert "One RL step on 8 GPUs" in page
    assert page.count("data:image/svg+xml;base64,") == 2


@pytest.mark.usefixtures("unpainted")
def test_rates_are_fitted_first(run, tmp_path):
    measure(tmp_path)
    result = run("config.toml", "--fit", "measured.jsonl", "--rate", "gemm_flops_per_s", "--output", "out")
    config = load_config(tmp_path / "config.toml")
    measured = load_measurements(tmp_path / "measured.jsonl", config.described())
    found = fit(measured, config, ["gemm_flops_per_s"])
    resolved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert resolved["hardware"] == {"preset": "h100", **found.parameters}
    fitted = config.model_copy(update={"hardware": resolved["hardware"]}).described()
    assert load_cluster(tmp_path / "out" / "cluster.toml") == fitted, "what plans can be priced by"
    figures = json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert figures["fit"]["measured_s"] == [0.004, 0.011]
    assert re.search(r"gemm_flops_per_s +600 TFLOP/s +[\d.,]+ TFLOP/s", result.stdout)
    assert "Rates fitted to measurements" in (tmp_path / "out" / "report.html").read_text()


@grid(
    ("text", "arguments", "message"),
    [
        (TOML.replace("gpus", "gpu"), ("config.toml",), "cluster.gpu: unknown key; did you mean gpus?"),
        (TOML, ("config.toml", "--output", "full"), "full is not empty; nothing was changed"),
        (TOML, ("config.toml", "--rate", "layer_s"), "add --fit MEASUREMENTS"),
        (TOML, ("config.toml", "--fit", "config.toml"), " is not JSON"),
    ],
    quick=2,
)
def test_a_users_error_is_one_message_and_exit_code_2(run, tmp_path, text, arguments, message):
    (tmp_path / "config.toml").write_text(text)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    measure(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    refused(message, "simulate", *arguments, cwd=tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_examples_can_be_read(path):
    assert load_config(path).workload.are_drawn
