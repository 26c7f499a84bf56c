"""The configuration of docs/experts.md: it is whole."""

import re
import tomllib
from pathlib import Path

from foreroute.train import parse_config

PAGE = (Path(__file__).parents[2] / "docs" / "experts.md").read_text(encoding="utf-8")


def test_the_configuration_for_two_ranks_is_read():
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    config = parse_config(tomllib.loads(text), source="page")
    assert (config.parallel.expert, config.rl.routing) == (2, "R3")
