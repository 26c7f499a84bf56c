"""Prints the oldest releases that pyproject.toml allows, as pip takes them: the base's, or those of extras.

`python make/lower_bounds.py` for the base, `python make/lower_bounds.py hf trl` for extras. torch is left out: its
older releases bring gigabytes of CUDA.
"""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
asked = [each for name in sys.argv[1:] for each in extras[name]] if sys.argv[1:] else project["dependencies"]
print(*sorted({re.sub(">=", "==", each) for each in asked if not re.match(r"(torch|foreroute)\b", each)}))
