"""Shared set-up: one thread, no network, quiet transformers."""

import gc
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture
def unpainted(monkeypatch):
    """Painting the pictures of a page takes a second; they are made up to there, and told in words."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda figure, buffer, **how: buffer.write(b"<svg></svg>"))


def pytest_collection_finish():
    """What is imported by now stays: without this, every full collection walks a million objects of it."""
    gc.freeze()


def pytest_collection_modifyitems(items):
    """The longest files begin first, so that the last ones leave no core idle: tests/slowest_files.txt."""
    listed = (Path(__file__).parent / "slowest_files.txt").read_text().splitlines()
    place = {name: n for n, name in enumerate(listed)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
