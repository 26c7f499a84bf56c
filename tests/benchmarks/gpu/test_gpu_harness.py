"""The command that proves things on a GPU: parts that fail, crash, hang or lack a package cost the others nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import PARTS, run
from benchmarks.gpu.device import describe
from benchmarks.gpu.page import finding, reached
from benchmarks.gpu.runner import PartSpec

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
SABOTEUR = """
    import importlib.abc, importlib.util, os, signal, sys, time

    def fails(part):
        with part.check("one"):
            pass
        with part.check("two"):
            assert 1 + 1 == 3, "one and one <is> not three"
        with part.check("three"):
            part.record(step_ratio=1.25, step_ratio_quartiles=[1.0, 1.5], step_ratio_aim="<= 1.005")

    def crashes(part):
        part.record(before_ms=3.0)
        with part.check("first"):
            pass
        os.kill(os.getpid(), signal.SIGSEGV)

    def hangs(part):
        part.record(reached_here=True)
        time.sleep(600)

    def passes(part):
        with part.check("fine"):
            pass

    def saves_nothing(part):
        os._exit(0)

    def is_late(part):
        part.ends_at = 0.0
        with part.check("late"):
            raise AssertionError("never begun")

    RUNS = {"bits": fails, "cost": crashes, "jobs": hangs, "mismatch": passes, "trainer": passes, "transfers": is_late}
    RUNS["planning"] = saves_nothing

    class Saboteur(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path, target=None):
            if name.rpartition(".")[2] in RUNS and name.startswith("benchmarks.gpu."):
                return importlib.util.spec_from_loader(name, self)
        def create_module(self, spec):
            return None
        def exec_module(self, module):
            module.run = RUNS[module.__name__.rpartition(".")[2]]

    sys.meta_path.insert(0, Saboteur())
"""


@pytest.fixture(scope="module")
def sabotaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run whose parts do as they should not."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "sitecustomize.py").write_text(textwrap.dedent(SABOTEUR), encoding="utf-8")
    few = {name: PartSpec(spec.shows, 60, ("json",)) for name, spec in PARTS.items()}
    few |= {"jobs": PartSpec("", 14, ("json",)), "trainer": PartSpec("", 60, ("json", "no_such_package"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.chdir(folder)  # parts work elsewhere, and the folder may be named from anywhere
        patch.setattr("benchmarks.gpu.runner.PARTS", few)
        patch.setattr("benchmarks.gpu.runner.GRACE_S", 1)
        names = ["bits", "cost", "jobs", "mismatch", "trainer", "transfers", "planning"]
        return run(names, "cpu", Path("out"), {"torch": "2.x"}), folder / "out"


def test_each_part_ends_as_what_happened_to_it(sabotaged: tuple[dict[str, Any], Path]) -> None:
    report, _ = sabotaged
    assert report["parts"] == {
        "bits": "failed: two: AssertionError: one and one <is> not three",
        "cost": "failed: it died of SIGSEGV, see cost.log",
        "jobs": "failed: it was ended after 15 s, see jobs.log",
        "mismatch": "passed",
        "trainer": "skipped: run: no_such_package cannot be imported: No module named 'no_such_package'",
        "transfers": "skipped: run: the part's time was used up before late",
        "planning": "failed: it saved nothing",
    }


def test_what_a_part_found_before_it_crashed_is_kept(sabotaged: tuple[dict[str, Any], Path]) -> None:
    report, folder = sabotaged
    assert report["metrics"]["cost"] == {"before_ms": 3.0}
    assert report["checks"]["cost"] == {"first": "passed"}
    assert report["metrics"]["jobs"] == {"reached_here": True}
    assert json.loads((folder / "gpu.json").read_text())["parts"] == report["parts"]


def test_the_page_says_first_what_passed_and_shows_every_figure_beside_its_aim(
    sabotaged: tuple[dict[str, Any], Path],
) -> None:
    page = (sabotaged[1] / "gpu.html").read_text()
    said = page.partition('class="card finding ">')[2].partition("</p>")[0]
    assert said.startswith("1 of 7 parts passed on a CPU")
    assert "4 failed, 2 skipped" in said
    assert "at small sizes" in said
    assert "one and one &lt;is&gt; not three" in page
    assert "1.25 (1 to 1.5)" in page
    assert "&lt;= 1.005" in page


def test_on_a_gpu_the_finding_says_how_many_aims_were_reached() -> None:
    figures = {"step_ratio": 1.02, "step_ratio_aim": "<= 1.005", "waits": 0, "waits_aim": "<= 0"}
    report = {"parts": {"cost": "passed"}, "device_name": "a GPU", "full": True, "metrics": {"cost": figures}}
    assert finding(report) == "1 of 1 parts passed on a GPU; 1 of 2 aims were reached"


def test_an_aim_is_reached_at_its_limit() -> None:
    assert reached(1.005, "<= 1.005")
    assert not reached(1.006, "<= 1.005")
    assert reached(0.9, ">= 0.9")
    assert not reached(0.89, ">= 0.9")


@pytest.mark.parametrize(
    ("device", "said"),
    [("cuda:99", "torch 2"), ("meta", "expected cuda, cuda:N or cpu"), ("gpu", "is no device of torch")],
)
def test_a_device_that_is_not_there_is_one_line(device: str, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        describe(device)
    assert said in str(ended.value)
    assert len(str(ended.value).splitlines()) == 1


def test_the_command_ends_with_that_line_and_an_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "gpu", "--device", "meta", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (1, "--device meta is not supported; expected cuda, cuda:N or cpu\n")
