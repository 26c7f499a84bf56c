"""Lists of pages are those of the code, and links between files of the repository lead somewhere."""

import re
import tomllib
from pathlib import Path

from foreroute.cli.main import app

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_the_first_page_lists_every_command():
    section = (ROOT / "docs" / "index.md").read_text().partition("\n## Commands\n")[2]
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert re.findall(r"^- `([a-z-]+)`: ", section, re.MULTILINE) == commands


def missing(page, text):
    """Relative links of a page that lead to no file."""
    links = [link for link in LINK.findall(text) if "://" not in link and not link.startswith("mailto:")]
    return [link for link in links if not (page.parent / link).exists()]


def test_no_relative_link_of_the_repository_is_broken():
    pages = [
        *ROOT.glob("*.md"),
        *(page for part in ("docs", "examples", "benchmarks") for page in (ROOT / part).rglob("*.md")),
    ]
    broken = {str(page.relative_to(ROOT)): found for page in pages if (found := missing(page, page.read_text()))}
    assert not broken
    assert missing(ROOT / "README.md", "[a](docs/none.md) [b](README.md#x)") == ["docs/none.md"]


def test_every_test_that_a_page_names_is_there():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {path for page in pages for path in re.findall(r"`(tests/[\w/]+\.py)", page.read_text())}
    assert len(named) > 10
    assert not [path for path in sorted(named) if not (ROOT / path).is_file()]


def test_the_map_of_rooms_is_that_of_the_import_rule():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    drawn = (ROOT / "CONTRIBUTING.md").read_text().partition("## Rooms")[2].partition("## Habits")[0]
    floors = [re.findall(r"\w+", line[4:27]) for line in drawn.split("\n") if re.match(r" {4}[a-z]", line)]
    wide = {"train": "train simulate conformance", "capture": "capture replay planner records"}
    expected = [re.findall(r"\w+", layer) for layer in contract]
    assert [wide.get(floor[0], " ".join(floor)).split() for floor in floors] == expected
