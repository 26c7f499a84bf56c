"""The page maker: what a page holds is shown as text, nothing is loaded or run, and no file of others is replaced."""

import os
import re

import pytest

from foreroute.errors import InputError
from foreroute.report.page import (
    Caption,
    Column,
    Key,
    Page,
    PageSection,
    Plot,
    Table,
    TableRow,
    Tile,
    write_page,
)
from tests.report.pages import rows_of, text_of

HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(1)>{{ 7*7 }}'


def page(text="quiet", **more):
    """A page with everything on it, whose every text is this one."""
    said = Caption(title=text, sentence=text, y_label=text, absent=text)
    table = Table(
        title=text,
        columns=(Column(text), Column(f"{text} 2", kind="words"), Column(f"{text} 3", kind="code")),
        rows=(TableRow(cells=(text, text, text), strong=True, colour="#d55e00", tone="problem"),),
        folded=text,
    )
    section = PageSection(
        heading=text,
        texts=(text,),
        keys=(Key(text, "#d55e00"),),
        plots=(
            Plot(caption=said),
            Plot(
                caption=said,
                image="data:image/svg+xml;base64,",
                alt=text,
                keys=(Key(text, None, "2 2"),),
                notes=(text,),
            ),
        ),
        tables=(table, table),
        notes=(text,),
    )
    whole = {"command": text, "title": text, "finding": text, "tiles": (Tile(text, text, text),), "facts": {text: text}}
    return Page(**(whole | {"sections": (section,)} | more))


def test_every_text_is_shown_and_is_nothing_but_text(tmp_path):
    html = write_page(tmp_path / "page.html", lambda: page(HOSTILE)).read_text()
    assert "<script" not in html
    assert html.count("<img") == 1
    assert text_of(html).count(HOSTILE) == text_of(write_page(tmp_path / "2.html", page).read_text()).count("quiet")
    assert "49" not in html


def test_nothing_is_loaded_and_the_same_page_is_the_same_file(tmp_path):
    html = [write_page(tmp_path / "page.html", page).read_text() for _ in range(2)]
    assert html[0] == html[1]
    assert not re.search(r"<script|<link|<iframe|<object|<embed|<base|https?://|@import|url\(", html[0])
    assert 'lang="en"' in html[0]
    assert 'name="viewport"' in html[0]


def test_only_a_page_of_ours_is_replaced(tmp_path):
    (tmp_path / "mine.html").write_text("<html><head><title>mine</title></head></html>")
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "link").symlink_to(tmp_path / "notes.txt")
    (tmp_path / "late.html").write_text(" " * 5000 + '<meta name="generator" content="foreroute">')
    os.mkfifo(tmp_path / "pipe")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    for target in (*before, tmp_path / "link"):
        with pytest.raises(InputError, match=r"foreroute.*nothing"):
            write_page(target, lambda: 1 / 0)  # and before it is drawn
    for target in (tmp_path / "pipe", tmp_path / "notes.txt" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(InputError, match="written"):
            write_page(target, page)
    with pytest.raises(InputError, match=r"folder.*write"):
        write_page(tmp_path, page)
    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "empty.html").write_text("")
    write_page(tmp_path / "empty.html", page)
    assert rows_of((tmp_path / "empty.html").read_text())["quiet"] == ["quiet", "quiet"]
