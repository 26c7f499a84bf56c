"""The page of a diagnosis: complete with all evidence and with none, self-contained, and safe to open."""

import re

import numpy as np
import pytest

from foreroute.conformance.diagnosis import Diagnosis, Evidence, Finding, Measures, Severity, TrainerPass
from foreroute.conformance.doctor import diagnose
from foreroute.errors import InputError
from foreroute.report import measure_rows, write_diagnosis
from traces import random_trace


def full():
    engine, own = random_trace(3), random_trace(3, route_seed=9)
    engine, own = (t.with_weight_version(1) for t in (engine, own))
    logprobs = -np.arange(1.0, 9.0)
    return diagnose(
        Evidence(
            engine=engine,
            engine_logprobs_R=logprobs,
            native=TrainerPass(own, logprobs + 0.1),
            replayed=TrainerPass(None, logprobs + 0.01),
            repeated=TrainerPass(own, logprobs + 0.1),
            repacked=TrainerPass(own, logprobs + 0.1),
        ),
        {"model": "test"},
    )


def test_everything_that_was_measured_is_on_the_page(tmp_path):
    diagnosis = full()
    html = write_diagnosis(diagnosis, tmp_path / "page.html").read_text()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))
    for finding in diagnosis.findings:
        assert finding.sentence[:60] in text.replace("&#39;", "'").replace("&gt;", ">")
    assert [row.name for row in measure_rows(diagnosis.measures)] == re.findall(r'<tr><th scope="row">(.*?)</th>', html)
    assert html.count("data:image/svg+xml;base64,") == 2
    assert not re.search(r"<script|<link|https?://|@import|url\(", html)


def test_a_diagnosis_without_evidence_says_what_is_missing(tmp_path):
    empty = Diagnosis(headline="Nothing.", findings=(), measures=Measures())
    html = write_diagnosis(empty, tmp_path / "page.html").read_text()
    assert html.count('class="absent"') == 2
    assert "<table" not in html


def test_words_from_outside_are_text(tmp_path):
    finding = Finding(Severity.PROBLEM, "wiring", "<script>alert(1)</script>")
    page = Diagnosis(headline="<img src=x>", findings=(finding,), measures=Measures(), facts={"model": "<b>"})
    html = write_diagnosis(page, tmp_path / "page.html").read_text()
    assert "<script" not in html
    assert "<img" not in html
    assert "<b>" not in html


def test_a_folder_as_target_is_refused(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        write_diagnosis(full(), tmp_path)
