"""The page of a diagnosis: complete with all evidence and with none."""

import numpy as np

from foreroute.doctor import Evidence, diagnose
from foreroute.doctor.evidence import TrainerPass
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
