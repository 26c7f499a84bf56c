"""The page of a diagnosis: complete with all evidence and with none, self-contained, and safe to open."""

import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from foreroute.doctor import Diagnosis, Evidence, Finding, Measures, Severity, TrainerPass, diagnose
from foreroute.errors import InputError
from foreroute.report import measure_rows, write_diagnosis
from foreroute.report.figure import layer_label, number_layers
from foreroute.trace import LayerKind, RoutedLayer, RoutingSpec
from tests.traces import random_trace


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
    assert [row.label for row in measure_rows(diagnosis.measures)] == re.findall(
        r'<tr><th scope="row">(.*?)</th>', html
    )
    assert html.count("data:image/svg+xml;base64,") == 2
    without, with_, *_ = measure_rows(diagnosis.measures)
    k3 = f"without replay {without.cells['k3, nats per token']} {with_.cells['k3, nats per token']} with"
    differ = f"that differ {without.cells['Differing decisions']} in {without.cells['Differing tokens']} of the tokens"
    assert all(re.sub(r"\s+", " ", tile) in text for tile in (k3, differ))
    assert not re.search(r"<script|<link|https?://|@import|url\(", html)


def test_layers_have_the_numbers_that_the_model_gives_them(tmp_path):
    spec = RoutingSpec(8, 2, (RoutedLayer(1), RoutedLayer(2), RoutedLayer(4)))
    engine, own = (replace(random_trace(3, route_seed=seed), spec=spec) for seed in (9, 10))
    html = write_diagnosis(
        diagnose(Evidence(engine=engine, native=TrainerPass(own, None))), tmp_path / "page.html"
    ).read_text()
    assert re.search(r"Tokens that differ: decoder 1 [\d.]+%, decoder 2 [\d.]+%, decoder 4 [\d.]+%", html)
    axis = Figure().subplots()
    axis.plot(range(3))
    number_layers(axis.xaxis, spec.layers)
    assert [axis.xaxis.get_major_formatter()(place, None) for place in range(4)] == ["1", "2", "4", ""]
    assert (layer_label(spec.layers), layer_label(())) == ("decoder layer", "routed layer, counted from 0")
    mixed = (RoutedLayer(0), RoutedLayer(0, LayerKind.MTP))
    number_layers(axis.xaxis, mixed)
    assert [axis.xaxis.get_major_formatter()(place, None) for place in range(2)] == ["decoder 0", "mtp 0"]


def test_a_diagnosis_without_evidence_says_what_is_missing(tmp_path):
    empty = Diagnosis(headline="Nothing.", findings=(), measures=Measures())
    html = write_diagnosis(empty, tmp_path / "page.html").read_text()
    assert html.count("is not shown") == 2
    assert "<figure" not in html
    assert "<table" not in html
    assert 'class="tiles"' not in html


def test_words_from_outside_are_text(tmp_path):
    finding = Finding(Severity.PROBLEM, "wiring", "<script>alert(1)</script>")
    page = Diagnosis(headline="<img src=x>", findings=(finding,), measures=Measures(), facts={"model": "<b>"})
    html = write_diagnosis(page, tmp_path / "page.html").read_text()
    assert "<script" not in html
    assert "<img" not in html
    assert "<b>" not in html


def test_a_file_that_is_no_page_of_ours_is_not_replaced(tmp_path):
    notes = tmp_path / "keep.txt"
    notes.write_text("notes")
    with pytest.raises(InputError, match="is no page that foreroute wrote; nothing was changed"):
        write_diagnosis(full(), notes)
    assert notes.read_text() == "notes"


def test_a_folder_as_target_is_refused(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        write_diagnosis(full(), tmp_path)
