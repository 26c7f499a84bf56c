"""Shared set-up: one thread, no network, quiet transformers, and the device and the end of tests marked `gpu`."""

import gc
import os
import sys
import time
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# for PyTorch's deterministic algorithms; cuBLAS reads it when it is first used
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_addoption(parser):
    group = parser.getgroup("tests marked gpu")
    group.addoption("--device", help="cuda, cuda:N, or cpu at small sizes; by default the GPU where torch sees one")
    group.addoption("--ends-at", type=float, default=float("inf"), help="skip tests from this second of the epoch on")


def pytest_configure(config):
    asked = config.getoption("--device")
    if asked is None:
        return
    import torch

    device_type, _, number = asked.partition(":")
    if device_type not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise pytest.UsageError(f"--device {asked} is not supported; expected cuda, cuda:N or cpu")
    if device_type == "cuda" and int(number or 0) >= torch.cuda.device_count():
        seen = f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here"
        raise pytest.UsageError(f"--device {asked}: {seen}; --device cpu shows that the command works")


@pytest.fixture
def no_graphs_left():
    """What `torch.compile` made before is forgotten, and what the test makes."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def workers():
    """`workers(4)`: four processes, started on first use and kept to the end; those that idle cost little."""
    from foreroute.testing.ranks import Workers

    groups = {}

    def of(num_ranks):
        if num_ranks not in groups or groups[num_ranks].is_closed:
            groups[num_ranks] = Workers(num_ranks, timeout_s=240)
        return groups[num_ranks]

    yield of
    for group in groups.values():
        group.close()


@pytest.fixture(scope="session")
def vllm_python():
    """The interpreter that has vLLM; the tests that need it run in CI."""
    named = os.environ.get("FOREROUTE_VLLM_PYTHON")
    python = Path(named or ".venv-vllm/bin/python").absolute()
    if not named and not python.exists():
        pytest.skip("there is no vLLM environment: run `make vllm-env`, or set FOREROUTE_VLLM_PYTHON")
    return python


@pytest.fixture
def unpainted(monkeypatch):
    """Painting the pictures of a page takes a second; they are made up to there, and told in words."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda figure, buffer, **how: buffer.write(b"<svg></svg>"))


def pytest_collection_finish():
    """What is imported by now stays: without this, every full collection walks a million objects of it."""
    if "torch" in sys.modules:
        from tests.seeds import seed_no_absent_devices

        seed_no_absent_devices()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """The longest files begin first, so that the last ones leave no core idle: tests/slowest_files.txt."""
    listed = (Path(__file__).parent / "slowest_files.txt").read_text().splitlines()
    place = {name: n for n, name in enumerate(listed)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def pytest_runtest_setup(item):
    if time.time() > item.config.getoption("--ends-at"):
        pytest.skip("the time of the whole run was used up")


@pytest.fixture(scope="session")
def device(request):
    """Where a test marked `gpu` runs. It is at small sizes on a CPU, to show that it works."""
    import torch

    found = torch.device(request.config.getoption("--device") or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type == "cuda":
        found = torch.device("cuda", found.index or 0)
        torch.cuda.set_device(found)  # takes no device without a number
    return found


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """A kernel that went wrong spoils its process for good. It is ended, and pytest-xdist starts another."""
    torch = sys.modules.get("torch")
    if item.get_closest_marker("gpu") is None or torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)
