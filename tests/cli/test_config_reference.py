"""docs/configuration.md is what the code says, and no key goes unexplained."""

import importlib.util
from pathlib import Path

import pytest

from foreroute.files.config_file import Section

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "make" / "config_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Silent(Section):
    """A key says nothing."""

    shown: int = 1
    """Something."""
    silent: int = 1


def test_the_page_is_up_to_date(reference):
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run make config-reference"


def test_a_key_without_a_text_is_refused(reference):
    with pytest.raises(SystemExit, match=r"Silent\.silent says nowhere what it means"):
        list(reference.tables(Silent, "silent"))
