"""Shared set-up: one thread, no network."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for shared in (".", "train", "conformance", "transfer", "adapters/hf"):
    sys.path.insert(0, str(Path(__file__).parent / shared))
