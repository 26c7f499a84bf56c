"""docs/configuration.md is what the code says, and no key goes unexplained."""

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from foreroute.files.config_file import Count, Section

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "make" / "config_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Inner(Section):
    """A table in a table."""

    kind: Literal["a", "b"] | None = None
    """One of | two."""


class Outer(Section):
    """Two
    lines.

    Not shown.
    """

    count: Count
    """How many."""
    shares: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (0.5,)
    """Of the whole,
    in parts."""
    inner: Inner = Inner()


class Silent(Section):
    """A key says nothing."""

    shown: int = 1
    """Something."""
    silent: int = 1


def test_the_page_is_up_to_date(reference):
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run make config-reference"


def test_a_table_shows_types_defaults_and_texts(reference):
    assert [line for line in reference.tables(Outer, "outer") if line] == [
        "### [outer]",
        "Two lines.",
        "| key | default, values | |",
        "|---|---|---|",
        "| `count` | required, integer ≥ 1 | How many. |",
        "| `shares` | `[0.5]`, list of number in (0, 1] | Of the whole, in parts. |",
        "### [outer.inner]",
        "A table in a table.",
        "| key | default, values | |",
        "|---|---|---|",
        '| `kind` | `"a"`, `"b"` | One of \\| two. |',
    ]


def test_a_key_without_a_text_is_refused(reference):
    with pytest.raises(SystemExit, match=r"Silent\.silent says nowhere what it means"):
        list(reference.tables(Silent, "silent"))
