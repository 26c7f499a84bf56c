"""What importing costs: the light core loads no framework, and no more than it needs."""

import json
import subprocess
import sys

import pytest

FRAMEWORKS = {"torch", "transformers", "megatron", "trl", "matplotlib"}
HEAVY = FRAMEWORKS | {"numba", "jinja2", "pydantic", "typer", "rich", "safetensors", "scipy"}


def loaded_by(statement):
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout))


def test_importing_the_package_loads_numpy_and_nothing_heavier():
    modules = loaded_by("import foreroute")
    assert "numpy" in modules
    assert modules.isdisjoint(HEAVY)


@pytest.mark.parametrize(
    "room",
    [
        "trace",
        "layout",
        "capture",
        "mismatch",
        "records",
        "plan",
        "costs",
        "planner",
        "simulate",
        "conformance",
        "doctor",
    ],
)
def test_the_pure_rooms_load_no_framework(room):
    assert loaded_by(f"import foreroute.{room}").isdisjoint(FRAMEWORKS)


@pytest.mark.parametrize("room", ["layout", "mismatch", "capture", "records"])
def test_what_reads_runs_and_traces_needs_no_extra(room):
    assert loaded_by(f"import foreroute.{room}").isdisjoint({"pydantic", "typer", "rich"})


def test_the_command_line_starts_without_torch():
    assert loaded_by("import foreroute.cli.main").isdisjoint(FRAMEWORKS)
