"""docs/settings.md, and the table of peers in docs/tensors.md, say what the tests show."""

from make import peers_table, settings_page


def test_the_page_and_the_table_of_peers_are_up_to_date():
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.settings_page(), "run make config-reference"
    page = peers_table.PAGE.read_text(encoding="utf-8")
    assert page == peers_table.with_table(page), "run make config-reference"
