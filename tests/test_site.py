"""Lists of pages are those of the code, and links between files of the repository lead somewhere."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from foreroute.cli.main import app
from tests.source_nodes import source_nodes

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


def error_classes():
    """Names of `ForerouteError` and of all public classes below it."""
    classes = [
        node for _, nodes in source_nodes() for node in nodes if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    ]
    found, before = {"ForerouteError"}, set()
    while found != before:
        before = set(found)
        found |= {node.name for node in classes if before & {ast.unparse(base) for base in node.bases}}
    return found


def messages():
    """Every text of the package that is no docstring; what f-strings fill in divides one."""
    every = [node for _, nodes in source_nodes() for node in nodes]
    documentation = {id(node.value) for node in every if isinstance(node, ast.Expr)}
    texts = [node for node in every if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(node.value for node in texts if id(node) not in documentation)


def faults_of_remedies(page, classes, texts):
    """Classes without a remedy or unknown, and quotations of no message."""
    sections = re.findall(r"^### (\w+)$(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    remedied = {name for name, text in sections if re.search(r"\*\*Do:\*\*\s+\S", text)}
    quoted = re.findall(r'^> "(.+)"$', page, re.MULTILINE)
    return sorted(classes ^ remedied), [quotation for quotation in quoted if quotation not in texts]


@pytest.mark.slow
def test_every_error_has_its_remedy_and_every_quotation_is_of_a_message():
    page, classes, texts = (ROOT / "docs" / "errors.md").read_text(), error_classes(), messages()
    assert faults_of_remedies(page, classes, texts) == ([], [])
    assert faults_of_remedies(page.replace("### LayoutError\n", ""), classes, texts)[0] == ["LayoutError"]
