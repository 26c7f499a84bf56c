"""Prints the oldest releases that pyproject.toml allows, as pip takes them: for a base install and the extras named."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = [each for extra in sys.argv[1:] for each in project["optional-dependencies"][extra]]
print(*(each.replace(">=", "==") for each in project["dependencies"] + extras))
