"""The page of runs: complete, and honest about what is missing."""

import base64
import re

import pytest

from foreroute.records import read_runs
from foreroute.report.run import write_report
from foreroute.report.run_tables import load_table
from tests.report.pages import plots_of, rows_of, text_of
from tests.report.report_runs import config, execution, side, step_line, write_run

TITLES = [
    "Mismatch of trainer and rollout engine (k3)",
    "Routing disagreement",
    "Tokens far apart, F(2)",
    "Routing disagreement by layer",
    "Top-k margins",
    "Reward",
    "Entropy",
    "Gradient norm",
    "Clipped tokens",
    "Expert load",
]


def runs(tmp_path, count=2):
    kinds = [("bfloat16", "none"), ("fp8", "R3"), ("float32", "R2")]
    return [
        write_run(
            tmp_path / f"{i}",
            config(f"run-{i}", seed=i, precision=kinds[i % 3][0], routing=kinds[i % 3][1]),
            [step_line(s, seed=i, native=s % 2 == 0, total=6) for s in range(6)],
        )
        for i in range(count)
    ]


def page_of(folders, tmp_path):
    return write_report(read_runs(folders), tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("comparison")
    return page_of(runs(tmp_path), tmp_path)


def test_every_plot_is_there_with_title_and_description(comparison):
    assert re.findall(r"<h3>(.*?)</h3>", comparison) == TITLES
    assert list(plots_of(comparison)) == TITLES
    assert all("run-0, run-1" in said for said in plots_of(comparison).values())
    for picture in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", comparison):
        drawn = base64.b64decode(picture).decode()
        assert "<svg" in drawn
        assert all(link.startswith("#") for link in re.findall(r'(?:xlink:)?href="([^"]*)"', drawn))


def test_a_comparison_names_every_run_and_marks_what_differs(comparison):
    text = text_of(comparison)
    assert "Comparison of 2 runs" in text
    assert "No routing replay" in text
    assert "R3, rollout routing replay" in text
    assert "neither predicts the reward" in text
    rows = re.findall(r'<tr class="( strong)?"><th scope="row">([\w.]+)</th>', comparison)
    assert ("", "model.experts") in rows
    assert [key for mark, key in rows if mark] == ["name", "seed", "rollout.precision", "rl.routing"]


@pytest.mark.usefixtures("unpainted")
def test_numbers_of_the_table_reach_the_page(tmp_path):
    native = side(0.00123, f2=0.025, cells=0.25, tokens=0.5)
    line = {"reward_mean": 0.25, "seconds": {"all": 1.5}, "mismatch": {"native": native}}
    lines = [{"step": i, **line} for i in range(20)]
    for both in lines[::5]:
        both["mismatch"] = {"native": native, "replayed": side(0.0)}
    html = page_of([write_run(tmp_path / "a", config("solo"), lines)], tmp_path)
    shown = re.findall(r'<tr class="( strong)?"><th scope="row"><span.*?</span>(solo</th>.*?)</tr>', html)
    cells = [[mark, *re.findall(r"<td[^>]*>(.*?)</td>", row.replace("\N{NO-BREAK SPACE}", " "))] for mark, row in shown]
    assert cells == [
        [" strong", "without", "25.0 %", "50.0 %", "1.23e-3", "2.50 %", "0.250", "0.250", "20", "1.50 s"],
        ["", "with", "0 %", "0 %", "0", "0 %", "", "", "", ""],
    ]
    assert "measured both ways at 4 of 20" in text_of(html)
    assert "Run solo" in text_of(html)


def test_a_run_with_nothing_optional_says_why_each_plot_is_absent(tmp_path):
    html = page_of([write_run(tmp_path / "a", config("bare"), [{"step": 0}])], tmp_path)
    text = text_of(html)
    assert "<figure" not in html
    assert text.count("is not shown. This was not recorded.") == len(TITLES) - 1  # nothing was clipped
    assert "Expert load is not shown" in text
    assert "bare: the mismatch of trainer and rollout engine was not recorded" in text


@pytest.mark.usefixtures("unpainted")
def test_expert_parallel_runs_show_the_load_of_their_ranks_and_what_plans_did_on_average(tmp_path):
    executions = [execution(step) for step in range(4)]
    lines = [step_line(step) | {"execution": each} for step, each in enumerate(executions)]
    spread = write_run(tmp_path / "spread", config("spread"), lines)
    alone = write_run(tmp_path / "alone", config("alone"), [step_line(0)])
    table = load_table(read_runs([alone, spread]))
    assert [column.heading for column in table.columns] == ["Mean of a step", "spread"]
    at_home = sum(each["max_over_mean"]["at_home"] for each in executions) / 4
    shown = {
        "Busiest rank over mean, experts at home": f"{at_home:.2f}",
        "Busiest rank over mean, as executed": "1.00",
        # 1,100 to 1,130 of 1,000
        "Experts at home over the bound of any packing, by length": "1.115",
        "Most memory of a rank in an update, modelled": "1.5 GB",
        # 3 MB by host memory, and 0 to 3 MB directly
        "Weights moved": "4.5 MB",
        "Waited for transfers": "0.50\N{NO-BREAK SPACE}s",
        # 0 + 1 + 2 + 3 of 6.8 seconds
        "Planning that nothing waited for": "88.2\N{NO-BREAK SPACE}%",
    }
    assert shown.items() <= dict(row.cells for row in table.rows).items()
    page = write_report(read_runs([alone, spread]), tmp_path / "report.html").read_text()
    assert "Load of every rank in every cell, step 3 of spread" in page
    assert rows_of(page)["Weights moved"] == ["4.5 MB"]


@pytest.mark.usefixtures("unpainted")
def test_what_is_odd_or_missing_is_said(tmp_path):
    """Of a killed run on two machines, which was measured one way, and of one that recorded less."""
    gpu = {"kind": "cuda", "name": "NVIDIA <H100>", "peak_memory_bytes": 3_000_000_000}
    lines = [step_line(i, replayed=False) | {"device": gpu} for i in range(3)]
    lines[1]["grad_norm"], lines[2]["grad_norm"] = float("nan"), float("inf")
    sparse = [step_line(i) | {"expert_load": {"8": 1.5}, "execution": {"ranks": 2}} for i in range(3)]
    for line in sparse:
        del line["margins_LB"]
        line["mismatch"]["replayed"] |= {"k3": 0.0}
    killed = write_run(tmp_path / "a", config("two", routing="R2"), lines, tail='{"step": 3, ')
    page = page_of([killed, write_run(tmp_path / "b", config("sparse"), sparse)], tmp_path)
    assert "Load of every rank" not in page, "no loads were recorded of live routes"
    for said in (
        "two: at no step was the mismatch measured both without and with replay",
        "trainer's own recompute pass",
        "two: Line 4 of metrics.jsonl is half written",
        "NVIDIA <H100>, up to 3.00 GB",
        "so that zero can be shown",
        "Not drawn: 2 values that are infinite or not a number.",
        "Not recorded by: “sparse”.",
    ):
        assert said in text_of(page), said
