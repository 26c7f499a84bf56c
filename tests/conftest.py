"""Shared set-up: one thread, no network."""

import gc
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_finish():
    """What is imported by now stays: without this, every full collection walks a million objects of it."""
    gc.freeze()


def pytest_collection_modifyitems(items):
    """The longest files begin first, so that the last ones leave no core idle: tests/slowest_files.txt."""
    listed = (Path(__file__).parent / "slowest_files.txt").read_text().splitlines()
    place = {name: n for n, name in enumerate(listed)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
