"""docs/settings.md says what the tests show."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARKS = """import pytest

@pytest.mark.shows("TRL", "beta")
@pytest.mark.parametrize("version", [pytest.param(1, marks=pytest.mark.shows("TRL", "FSDP1", refused="why"))])
def test_first(version): ...
"""


@pytest.fixture(scope="module")
def writer():
    spec = importlib.util.spec_from_file_location("settings_page", ROOT / "make" / "settings_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(writer):
    assert writer.PAGE.read_text(encoding="utf-8") == writer.settings_page(), "run make config-reference"


def test_each_mark_is_a_row_and_none_stands_twice(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "ROOT", tmp_path)
    (tmp_path / "test_one.py").write_text(MARKS)
    page = writer.settings_page(tmp_path)
    assert page.index("| beta | works | [test_one](") < page.index("| FSDP1 | refused: why | [test_one](")
    (tmp_path / "test_two.py").write_text(MARKS.replace("FSDP1", "FSDP2"))
    with pytest.raises(ValueError, match=r"'TRL', 'beta'.*each setting once"):
        writer.settings_page(tmp_path)
