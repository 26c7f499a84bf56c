"""The cost part of the GPU proof: what it counts is there to be counted."""

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
    return json.loads(file.with_name("counted.json").read_text(encoding="utf-8"))


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
        assert len(places) == figures[f"modelled_syncs_added_by_{session}"]
