"""Pages that are made from the code are up to date, and links between files of the repository lead somewhere."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_the_page_of_the_command_line_is_what_help_says(tmp_path):
    page = tmp_path / "command-line.md"
    command = [sys.executable, "-m", "typer", "foreroute.cli.main", "utils", "docs", "--name", "foreroute"]
    subprocess.run([*command, "--output", page], cwd=tmp_path, check=True, capture_output=True)
    again = "python -m typer foreroute.cli.main utils docs --name foreroute --output docs/command-line.md"
    assert (ROOT / "docs" / "command-line.md").read_text() == page.read_text(), f"out of date; run: {again}"


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


def test_every_benchmark_has_its_row_and_every_section_that_a_row_names_is_there():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\|$", page.partition("\n## ")[0], re.MULTILINE)
    assert sorted(rows) == sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    assert not set(re.findall(r"\]\(#([^)]+)\)", page)) - headings


def test_every_room_has_a_page_of_the_reference_but_those_without_public_names():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    rooms = {path.parent.name for path in (ROOT / "src" / "foreroute").glob("*/__init__.py")} - {"cli", "files"}
    assert not [room for room in sorted(rooms) if f"\n::: foreroute.{room}" not in pages]


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
