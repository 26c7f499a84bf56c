"""What the report shows of the loss: the figures that were recorded, and no empty cards."""

import pytest
from matplotlib.figure import Figure

from foreroute.records import read_runs
from foreroute.report import summary_rows, write_report
from foreroute.report.run_plots import _up_to_all, update_plots
from foreroute.report.run_tables import describe
from tests.report.report_runs import config, step_line, write_run


def runs_of(tmp_path, figures):
    return [write_run(tmp_path / "run", config("r"), [step_line(step) | figures for step in range(4)])]


def titles(folders):
    return [plot.caption.title for plot in update_plots(read_runs(folders))]


def test_a_bound_that_nothing_reached_is_no_plot(tmp_path):
    figures = {"clip_share": 0.0, "importance": {"effective_share": 0.9, "cut_share": 0.0}}
    assert titles(runs_of(tmp_path, figures)) == ["Effective sample size"]


@pytest.mark.usefixtures("unpainted")
def test_everything_that_happened_is_shown(tmp_path):
    importance = {"effective_share": 0.5, "cut_share": 0.2}
    folders = runs_of(tmp_path, {"clip_share": 0.1, "importance": importance})
    expected = ["Effective sample size", "Clipped tokens", "Corrected tokens"]
    assert titles(folders) == expected
    page = write_report(read_runs(folders), tmp_path / "page.html").read_text()
    assert all(title in page for title in expected)


def test_shares_near_all_are_told_apart():
    axes = Figure().subplots()
    axes.plot([0, 1], [0.98, 1.0])
    _up_to_all(axes)
    low, high = axes.get_ylim()
    assert 0.97 < low < 0.98
    assert 1 < high < 1.01


@pytest.mark.usefixtures("unpainted")
def test_a_run_says_where_it_ran(tmp_path):
    on_cpu, on_gpu = {"kind": "cpu", "name": "x86_64"}, {"kind": "cuda", "name": "NVIDIA <H100>"}
    peaks = [on_cpu, on_gpu | {"peak_memory_bytes": 3_000_000_000}, on_gpu | {"peak_memory_bytes": 2_500_000_000}]
    lines = [step_line(step) | {"device": device} for step, device in enumerate(peaks)]
    (run,) = runs = read_runs([write_run(tmp_path / "run", config("r"), lines)])
    assert describe(run, *summary_rows(runs))["device"] == "CPU, x86_64; NVIDIA <H100>, up to 3.00 GB"
    assert "NVIDIA &lt;H100&gt;, up to 3.00 GB" in write_report(runs, tmp_path / "page.html").read_text()
