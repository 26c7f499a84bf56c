"""Shared set-up: one thread, no network."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_finish():
    """What is imported by now stays: without this, every full collection walks a million objects of it."""
    gc.freeze()
