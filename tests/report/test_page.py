"""The page maker: all is shown as text, nothing is loaded, no file of others replaced; the page of a diagnosis."""

import os
import re

import numpy as np
import pytest

from foreroute.doctor import Evidence, diagnose
from foreroute.doctor.evidence import TrainerPass
from foreroute.errors import InputError
from foreroute.report import write_diagnosis
from foreroute.report.diagnosis import finding_table, measure_table
from foreroute.report.page import Caption, Column, Key, Page, PageSection, Plot, Table, TableRow, Tile, write_page
from tests.report.pages import rows_of, text_of
from tests.traces import random_trace

HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(1)>{{ 7*7 }}'


def page(text="quiet", **more):
    """A page with everything on it, whose every text is this one."""
    said = Caption(title=text, sentence=text, y_label=text, absent=text)
    table = Table(
        title=text,
        columns=(Column(text), Column(f"{text} 2", content="words"), Column(f"{text} 3", content="code")),
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


ENGINE, OWN = (random_trace(3, route_seed=seed).with_weight_version(1) for seed in (3, 9))
LOGPROBS = -np.arange(1.0, 9.0)


def test_everything_that_was_measured_is_on_the_page(tmp_path):
    own = TrainerPass(OWN, LOGPROBS + 0.1)
    given = {"native": own, "repacked": own, "replayed": TrainerPass(None, LOGPROBS + 0.01)}
    diagnosis = diagnose(Evidence(engine=ENGINE, engine_logprobs_R=LOGPROBS, **given), {"model": "test"})
    html = write_diagnosis(diagnosis, tmp_path / "page.html", [("Look at the run", "foreroute report r")]).read_text()
    text = text_of(html)
    severities = finding_table(diagnosis).column("")
    assert severities == sorted(severities, key=["problem", "warning", "note", "fine"].index)
    for finding in diagnosis.findings:
        assert f"{finding.sentence} {finding.advice}".strip() in text
    table = measure_table(diagnosis.measures)
    for row in table.rows:
        assert " ".join(row.cells).replace("\N{NO-BREAK SPACE}", " ") in text, row
    assert html.count("data:image/svg+xml;base64,") == 2
    assert "Look at the run foreroute report r" in text
