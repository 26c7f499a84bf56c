"""Prints the oldest releases that pyproject.toml allows for a base install, as pip takes them."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
print(*(each.replace(">=", "==") for each in project["dependencies"]))
