"""The cost part of the GPU proof: what it counts is there to be counted, and what the page shows is measured."""

import json
import subprocess
import sys

import pytest

from foreroute.testing.ranks import environment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    file = tmp_path_factory.mktemp("cost") / "cost.json"
    command = [sys.executable, "-m", "tests.benchmarks.gpu.counted_worker", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(), check=False)
    assert not done.returncode, done.stderr
    found = json.loads(file.with_name("counted.json").read_text(encoding="utf-8"))
    return found | {"folder": file.parent}


@pytest.mark.parametrize(
    ("work", "launches", "waits"),
    [
        ("sum", 2, 0),
        ("views", 0, 0),
        ("item", 2, 1),
        ("to the host", 1, 1),
        ("to the device", 1, 1),
        ("to the device, without waiting", 1, 0),
        ("into the device", 1, 1),
        ("in place", 1, 0),
        ("by a mask", 2, 1),
        ("by indices", 1, 0),
        ("by indices of the host", 1, 1),
        ("on the host", 0, 0),
        ("made", 1, 0),
    ],
)
def test_launches_and_waits_are_counted_and_placed(counted, work, launches, waits):
    seen_launches, seen_waits = counted["toys"][work]
    assert seen_launches == launches
    assert len(seen_waits) == waits
    assert all("gpu/counted_worker.py:" in place for place in seen_waits)


def test_every_ratio_stands_beside_its_quartiles_and_an_aim_beside_its_figure(counted):
    figures = counted["figures"]
    ratios = {name for name in figures if name.endswith("_ratio")}
    assert ratios >= {
        *("forward_ratio", "forward_without_telemetry_ratio", "forward_in_a_row_ratio", "forward_a_over_a_ratio"),
        *("step_ratio", "step_without_telemetry_ratio", "step_in_a_row_ratio", "step_a_over_a_ratio"),
        *("step_recording_ratio", "prefill_recording_ratio", "decode_recording_ratio", "decode_a_over_a_ratio"),
        *("decode_recording_and_trace_ratio", "eager_forward_ratio", "batched_mm_forward_ratio"),
    }
    for name in ratios:
        low, high = figures[f"{name}_quartiles"]
        assert low <= figures[name] <= high, name
    aims = {name: aim for name, aim in figures.items() if name.endswith("_aim")}
    assert aims == {
        "forward_ratio_aim": "<= 1.01",
        "step_ratio_aim": "<= 1.005",
        "decode_recording_ratio_aim": "<= 1.01",
        "modelled_syncs_added_by_replay_aim": "<= 0",
    }
    assert {name.removesuffix("_aim") for name in aims} <= figures.keys()


def test_sessions_are_seen_to_launch_and_every_wait_of_theirs_has_a_place(counted):
    figures = counted["figures"]
    # recording copies what a router picked; telemetry does more than replay without it
    assert figures["modelled_launches_added_per_layer_by_recording"] >= 1
    assert (
        figures["modelled_launches_added_per_layer_by_replay"]
        > figures["modelled_launches_added_per_layer_by_replay_without_telemetry"]
        >= 1
    )
    for session in ("replay", "replay_without_telemetry", "replay_with_mask", "recording"):
        places = [
            place for place in figures["modelled_syncs_of_foreroute"] if place.startswith(f"{session}: foreroute/")
        ]
        inside, around = (
            figures[f"modelled_syncs_{where}_{session}"] for where in ("added_by", "of_opening_and_closing")
        )
        assert len(places) == inside + around


def test_all_that_can_run_without_a_gpu_does_and_leaves_a_profile(counted):
    outcomes = counted["checks"]
    assert {name for name, outcome in outcomes.items() if outcome != "passed"} == {"memory"}
    assert outcomes["memory"].startswith("skipped: only on CUDA")
    profile = (counted["folder"] / "cost_profile.txt").read_text(encoding="utf-8")
    assert "== unpatched" in profile
    assert "== replay" in profile
