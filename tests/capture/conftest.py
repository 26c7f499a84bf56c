"""The wire writers live beside the fuzz runner in benchmarks/, at the root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
