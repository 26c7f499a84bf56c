"""The page of a diagnosis: complete with all evidence and with none."""

import re
from dataclasses import replace

import numpy as np

from foreroute.doctor import Diagnosis, Evidence, diagnose
from foreroute.doctor.evidence import Measures, TrainerPass
from foreroute.report import write_diagnosis
from foreroute.report.diagnosis import measure_table
from tests.report.pages import text_of
from tests.traces import random_trace

ENGINE, OWN = (random_trace(3, route_seed=seed).with_weight_version(1) for seed in (3, 9))
LOGPROBS = -np.arange(1.0, 9.0)


def test_everything_that_was_measured_is_on_the_page(tmp_path):
    own = TrainerPass(OWN, LOGPROBS + 0.1)
    given = {"native": own, "repeated": own, "repacked": own, "replayed": TrainerPass(None, LOGPROBS + 0.01)}
    diagnosis = diagnose(Evidence(engine=ENGINE, engine_logprobs_R=LOGPROBS, **given), {"model": "test"})
    html = write_diagnosis(diagnosis, tmp_path / "page.html", [("Look at the run", "foreroute report r")]).read_text()
    text = text_of(html)
    for finding in diagnosis.findings:
        assert f"{finding.sentence} {finding.advice}".strip() in text
    table = measure_table(diagnosis.measures)
    for row in table.rows:
        assert " ".join(row.cells).replace("\N{NO-BREAK SPACE}", " ") in text, row
    assert table.column("Differing decisions")[1] == "0, forced"
    assert html.count("data:image/svg+xml;base64,") == 2
    assert "Look at the run foreroute report r" in text


def test_the_table_has_what_was_measured_and_nothing_else(tmp_path):
    """Routes alone, with and without a pass on them; log-probs alone; the trainer beside itself alone."""
    native, replayed = TrainerPass(OWN, LOGPROBS), TrainerPass(None, LOGPROBS)
    shares = measure_table(diagnose(Evidence(engine=ENGINE, native=native)).measures).rows[0].cells[3:]
    assert all(re.fullmatch(r"\d+(\.\d+)?.%", share) and share != "0" for share in shares), shares
    unscored = Evidence(engine=ENGINE, native=native, replayed=replayed, repeated=native, repacked=native)
    scored = replace(unscored, engine_logprobs_R=LOGPROBS - 0.1)
    dash, first, forced = "\N{EN DASH}", "Engine and trainer, without replay", "Engine and trainer, with replay"
    for evidence, name, expected in (
        (unscored, first, (dash, dash, *shares)),
        (replace(unscored, replayed=None), first, (dash, dash, *shares)),
        (scored, forced, (..., ..., "0, forced", "0, forced")),
        (replace(scored, engine=None), first, (..., ..., dash, dash)),
        (replace(unscored, random_weights=True), None, ()),
    ):
        rows = {row.cells[0]: row.cells[1:] for row in measure_table(diagnose(evidence).measures).rows}
        assert all(want in (cell, ...) for cell, want in zip(rows.get(name, ()), expected, strict=True))
        assert [name for name, cells in rows.items() if "0, forced" in cells] == (
            [] if evidence.engine_logprobs_R is None else [forced]
        )


def test_a_diagnosis_without_evidence_says_what_is_missing(tmp_path):
    empty = Diagnosis(headline="Nothing.", findings=(), measures=Measures())
    html = write_diagnosis(empty, tmp_path / "page.html").read_text()
    assert html.count("is not shown") == 2
    assert "<figure" not in html
    assert "<table" not in html
