"""docs/settings.md, and the table of peers in docs/tensors.md, say what the tests show."""

import pytest

from make import peers_table, settings_page
from make.settings_page import SOURCE

MARKS = """import pytest

@pytest.mark.shows("TRL", "beta")
@pytest.mark.parametrize("version", [pytest.param(1, marks=pytest.mark.shows("TRL", "FSDP1", refused="why"))])
def test_first(version): ...
"""


def test_the_page_is_up_to_date():
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.settings_page(), "run make config-reference"


def test_the_table_of_peers_is_up_to_date():
    page = peers_table.PAGE.read_text(encoding="utf-8")
    assert page == peers_table.with_table(page), "run make config-reference"
    assert page.count("| torchtitan 0.3.0 | Qwen3; DeepSeek-V3; gpt-oss blocks |") == 1


def test_each_mark_is_a_line_and_none_stands_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(settings_page, "ROOT", tmp_path)
    (tmp_path / "test_one.py").write_text(MARKS)
    page = settings_page.settings_page(tmp_path)
    works, refused = f"- [beta]({SOURCE}test_one.py)\n", f"- [FSDP1]({SOURCE}test_one.py): why\n"
    assert page.index(works) < page.index(refused)
    (tmp_path / "test_two.py").write_text(MARKS.replace("FSDP1", "FSDP2"))
    with pytest.raises(ValueError, match=r"'TRL', 'beta'.*setting"):
        settings_page.settings_page(tmp_path)
