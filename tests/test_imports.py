"""What importing costs: the light core loads no framework, and no more than it needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {"torch", "transformers", "megatron", "trl", "matplotlib"}
HEAVY = FRAMEWORKS | {"jinja2", "pydantic", "typer", "rich", "safetensors", "scipy"}


def loaded_by(*statements):
    """The modules that are there behind each of these, which one process runs one after the other."""
    shown = "print(json.dumps(sorted(sys.modules)))\n"
    code = "import json, sys\n" + "".join(f"{statement}\n{shown}" for statement in statements)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in run.stdout.splitlines()]


def rooms_of(modules):
    return {name.split(".")[1] for name in modules if name.startswith("foreroute.")}


PURE_ROOMS = (
    *("trace", "layout", "capture", "mismatch", "records", "plan", "costs", "planner", "simulate", "conformance"),
    "doctor",
)


def test_importing_loads_what_is_asked_for():
    package, named, compared, pure, drawing, command_line = loaded_by(
        "import foreroute as fr\nassert set(fr.__all__) == set(dir(fr))",
        "fr.load, fr.planner",
        "fr.compare",
        all_of(PURE_ROOMS),
        "import foreroute.report",
        "import foreroute.cli.main",
    )
    assert rooms_of(package) == set()
    assert package.isdisjoint(HEAVY | {"numpy"})
    assert {"foreroute.trace", "foreroute.planner"} <= named
    assert named.isdisjoint(HEAVY | {"foreroute.capture", "foreroute.doctor"})
    assert "foreroute.doctor.comparison" in compared
    assert pure.isdisjoint(FRAMEWORKS)
    assert drawing.isdisjoint({"matplotlib", "jinja2"}), "reading runs and making rows"
    assert command_line.isdisjoint(FRAMEWORKS)


@pytest.mark.slow
def test_the_core_loads_no_other_room_and_attaching_a_model_and_a_base_install_what_they_take_alone():
    """No format of files, no packer, no metrics, no executor of plans; and no library of the command line."""
    core, attached, _ = loaded_by(
        "from foreroute.core import attach",
        "from foreroute.adapters import hf\nhf.attach",
        blocked(OF_CLI) + all_of(BASE_ROOMS),  # the rest of them: those above have loaded none of these libraries
    )
    assert rooms_of(core) == {"core"}
    assert rooms_of(attached) == {"adapters", "checks", "core", "errors", "kernels", "layout", "replay", "trace"}
    files = {"replay.recording", "replay.sampling_masks", "trace.file", "layout.packing", "adapters.hf.indexers"}
    assert attached.isdisjoint({f"foreroute.{name}" for name in files} | set(OF_CLI))


def all_of(rooms):
    """One process imports them all: what it has not loaded, none of them has."""
    return "".join(f"import foreroute.{room}\n" for room in rooms)


BASE_ROOMS = (
    *("errors", "kernels", "checks", "files", "trace", "layout", "plan", "costs", "costs.cluster_file", "planner"),
    *("mismatch", "capture", "core", "replay", "ep", "conformance", "doctor"),
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


def test_the_command_line_says_which_extra_it_needs():
    code = blocked(OF_CLI) + "from foreroute.cli.__main__ import main\nmain()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    needed = "error: the command line needs typer, which is not installed; pip install '.[cli]' in a clone of foreroute"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", f"{needed} brings it\n")
