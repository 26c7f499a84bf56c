"""What importing costs: the light core loads no framework, and no more than it needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {"torch", "transformers", "megatron", "trl", "matplotlib"}
HEAVY = FRAMEWORKS | {"jinja2", "pydantic", "typer", "rich", "safetensors", "scipy"}


def loaded_by(statement):
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout))


def test_importing_the_package_loads_nothing_else():
    modules = loaded_by("import foreroute")
    assert [name for name in modules if name.startswith("foreroute.")] == []
    assert modules.isdisjoint(HEAVY | {"numpy"})


def test_a_name_loads_the_room_that_it_is_in():
    asked = loaded_by("import foreroute as fr\nfr.load, fr.planner")
    assert {"foreroute.trace", "foreroute.planner"} <= asked
    assert asked.isdisjoint(HEAVY | {"foreroute.capture"})


def test_the_core_loads_torch_and_no_other_room():
    rooms = {name.split(".")[1] for name in loaded_by("from foreroute.core import attach") if "foreroute." in name}
    assert rooms == {"core"}


@pytest.mark.slow
def test_attaching_a_hugging_face_model_loads_what_it_takes_alone():
    """No format of files, no packer, no metrics, no executor of plans."""
    modules = loaded_by("from foreroute.adapters import hf\nhf.attach")
    rooms = {name.split(".")[1] for name in modules if name.startswith("foreroute.")}
    assert rooms == {"adapters", "checks", "core", "errors", "kernels", "layout", "replay", "trace"}
    files = {"replay.recording", "replay.sampling_masks", "trace.file", "layout.packing", "adapters.hf.indexers"}
    assert modules.isdisjoint({f"foreroute.{name}" for name in files} | {"pydantic"})


def test_comparing_arrays_loads_the_doctor_when_it_is_asked_for_and_no_framework():
    assert "foreroute.doctor" not in loaded_by("import foreroute")
    asked = loaded_by("import foreroute\nforeroute.compare")
    assert "foreroute.doctor.comparison" in asked
    assert asked.isdisjoint(FRAMEWORKS)


PURE_ROOMS = (
    *("trace", "layout", "capture", "mismatch", "records", "plan", "costs", "planner", "simulate", "conformance"),
    "doctor",
)


def test_the_pure_rooms_load_no_framework():
    assert loaded_by(all_of(PURE_ROOMS)).isdisjoint(FRAMEWORKS)


def all_of(rooms):
    """One process imports them all: what it has not loaded, none of them has."""
    return "".join(f"import foreroute.{room}\n" for room in rooms)


BASE_ROOMS = (
    *("errors", "kernels", "checks", "files", "trace", "layout", "plan", "costs", "costs.cluster_file", "planner"),
    *("mismatch", "records", "capture", "core", "replay", "ep", "conformance", "doctor"),
)
"""Rooms below `train` and `simulate`, and those beside them that take no configuration, where torch is installed."""
OF_CLI = ("typer", "rich", "pydantic")


def blocked(libraries):
    """The text of a program that has none of these libraries."""
    return f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {libraries}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def test_a_base_install_needs_none_of_the_libraries_of_the_command_line():
    assert loaded_by(blocked(OF_CLI) + all_of(BASE_ROOMS)).isdisjoint(OF_CLI)


def test_the_command_line_says_which_extra_it_needs():
    code = blocked(OF_CLI) + "from foreroute.cli.__main__ import main\nmain()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    needed = "error: the command line needs typer, which is not installed; pip install '.[cli]' in a clone of foreroute"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", f"{needed} brings it\n")


def test_reading_runs_and_making_rows_load_no_plotting_library():
    assert loaded_by("import foreroute.report").isdisjoint({"matplotlib", "jinja2"})


def test_the_command_line_starts_without_torch():
    assert loaded_by("import foreroute.cli.main").isdisjoint(FRAMEWORKS)
