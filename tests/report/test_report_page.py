"""The page: complete, self-contained, safe to open, and honest about what is missing."""

import base64
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from foreroute.errors import InputError, RunFolderError
from foreroute.records import read_runs
from foreroute.report import load_rows, write_report
from tests.report.report_runs import config, execution, step_line, write_run

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


class Page(HTMLParser):
    """Tags with attributes, and the visible text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(html)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def runs(tmp_path, count=2, name="run"):
    kinds = [("bfloat16", "none"), ("fp8", "R3"), ("float32", "R2")]
    return [
        write_run(
            tmp_path / f"{i}",
            config(f"{name}-{i}", seed=i, precision=kinds[i % 3][0], routing=kinds[i % 3][1]),
            [step_line(s, seed=i, native=s % 2 == 0, total=6) for s in range(6)],
        )
        for i in range(count)
    ]


def small_run(folder, name="small", **rl):
    """A run of which four plots can be drawn, and so quickly."""
    lines = [{"step": i, "entropy": 1.0 - i / 10, "mismatch": step_line(i)["mismatch"]} for i in range(3)]
    for line in lines:
        for side in line["mismatch"].values():
            del side["differing_share_by_layer"]
    return write_run(folder, config(name, **rl), lines)


def page_of(folders, tmp_path):
    return Page(write_report(folders, tmp_path / "out" / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("comparison")
    return write_report(runs(tmp_path), tmp_path / "report.html").read_text(encoding="utf-8")


def test_every_plot_is_there_with_title_and_description(comparison):
    page = Page(comparison)
    assert [text.strip() for text in re.findall(r"<h3>(.*?)</h3>", comparison)] == TITLES
    images = page.all("img")
    assert len(images) == len(TITLES)
    for image, title in zip(images, TITLES, strict=True):
        assert image["alt"].startswith(title)
        assert "run-0, run-1" in image["alt"]
        picture = base64.b64decode(image["src"].removeprefix("data:image/svg+xml;base64,"))
        assert b"<svg" in picture


def test_the_page_loads_nothing_and_runs_nothing(comparison):
    page = Page(comparison)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base"}
    targets = [attrs[key] for _, attrs in page.tags for key in ("src", "href", "srcset", "action") if key in attrs]
    assert targets
    assert all(target.startswith("data:") for target in targets)
    assert not re.search(r"@import|url\(|https?://", comparison)
    for image in page.all("img"):
        picture = base64.b64decode(image["src"].split(",")[1]).decode()
        links = re.findall(r'(?:xlink:)?href="([^"]*)"', picture)
        assert all(link.startswith("#") for link in links)


def test_the_page_fits_readers_and_phones(comparison):
    page = Page(comparison)
    assert page.all("html")[0]["lang"] == "en"
    assert any(attrs.get("name") == "viewport" for attrs in page.all("meta"))
    assert "Without replay means" in page.text
    assert "neither predicts the reward" in page.text


def test_a_comparison_names_every_run_and_marks_what_differs(comparison):
    page = Page(comparison)
    assert "Comparison of 2 runs" in page.text
    assert "No routing replay" in page.text
    assert "R3, rollout routing replay" in page.text
    rows = re.findall(r'<tr( class="differs")?><th scope="row">([\w.]+)</th>', comparison)
    assert ("", "model.experts") in rows
    assert [key for mark, key in rows if mark] == ["name", "seed", "rollout.precision", "rl.routing"]


def test_numbers_of_the_table_reach_the_page(tmp_path):
    def side(k3, share):
        return {"k3": k3, "f2": share / 10, "differing_share": share, "differing_tokens_share": 2 * share}

    lines = [
        {"step": i, "reward_mean": 0.25, "seconds": {"all": 1.5}, "mismatch": {"native": side(0.00123, 0.25)}}
        for i in range(20)
    ]
    for line in lines[::5]:
        line["mismatch"]["replayed"] = side(0.0, 0.0)
    page = page_of([write_run(tmp_path / "a", config("solo"), lines)], tmp_path)
    table = page.text[page.text.index("All figures") : page.text.index("Bold")]
    for shown in ("20", "0.250", "1.23e-3", "2.50 %", "25.0 %", "50.0 %", "0 %", "1.50 s"):
        assert shown in table
    assert "measured both ways at 4 of 20" in page.text


def test_one_run_has_its_name_as_title(tmp_path):
    page = page_of([small_run(tmp_path / "a", "lonely")], tmp_path)
    assert "Run lonely" in page.text
    assert len(page.all("img")) == 4


def test_more_runs_than_colours(tmp_path):
    page = page_of([small_run(tmp_path / str(i), f"run-{i}") for i in range(9)], tmp_path)
    assert "Comparison of 9 runs" in page.text


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "$\\frac{1}$ {{ 7*7 }}"]
)
def test_a_run_name_is_text_wherever_it_stands(tmp_path, name):
    folders = [small_run(tmp_path / str(i), name, note=name) for i in range(2)]
    html = write_report(folders, tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert not page.all("script")
    assert not any("onerror" in attrs for _, attrs in page.tags)
    assert len(page.all("img")) == 4
    assert re.sub(r"\s+", " ", name) in page.text


def test_a_run_with_nothing_optional_says_why_each_plot_is_absent(tmp_path):
    page = page_of([write_run(tmp_path / "a", config("bare"), [{"step": 0}])], tmp_path)
    assert page.all("img") == page.all("figure") == []
    assert page.text.count("is not shown. This was not recorded.") == len(TITLES) - 1  # nothing was clipped
    assert "Expert load is not shown" in page.text
    assert "bare: the mismatch of trainer and rollout engine was not recorded" in page.text


def test_a_run_that_lacks_what_another_has_is_named(tmp_path):
    lines = [step_line(i) for i in range(3)]
    for line in lines:
        del line["margins_LB"]
        line["expert_load"] = {"8": 1.5}
    folders = [*runs(tmp_path, 1), write_run(tmp_path / "b", config("sparse"), lines)]
    assert page_of(folders, tmp_path).text.count("Not recorded by: sparse.") == 1


def test_an_r2_run_measured_without_replay_only(tmp_path):
    lines = [step_line(i, replayed=False) for i in range(4)]
    page = page_of([write_run(tmp_path / "a", config("two", routing="R2"), lines)], tmp_path)
    assert len(page.all("img")) == len(TITLES)
    assert "two: at no step was the mismatch measured both without and with replay" in page.text
    assert "trainer's own recompute pass" in page.text


def test_zeros_and_values_without_a_number_are_shown_or_counted(tmp_path):
    lines = [step_line(i) for i in range(4)]
    for line in lines:
        line["mismatch"]["replayed"] |= {"k3": 0.0}
    lines[1]["grad_norm"], lines[2]["grad_norm"] = float("nan"), float("inf")
    page = page_of([write_run(tmp_path / "a", config(), lines)], tmp_path)
    assert "so that zero can be shown" in page.text
    assert page.text.count("Not drawn: 2 values that are infinite or not a number.") == 1


def test_a_killed_run_is_reported_with_a_note(tmp_path):
    folder = write_run(tmp_path / "a", config("killed"), [step_line(i) for i in range(3)], tail='{"step": 3, ')
    assert "killed: Line 4 of metrics.jsonl is half written" in page_of([folder], tmp_path).text


def test_a_report_is_replaced_whole_or_not_at_all(tmp_path):
    target = tmp_path / "report.html"
    target.write_text("")
    assert write_report([small_run(tmp_path / "0")], target) == target, "an empty file is nobody's"
    first = target.read_bytes()
    with pytest.raises(RunFolderError):
        write_report([tmp_path / "nowhere"], target)
    assert target.read_bytes() == first
    write_report([tmp_path / "0"], target)
    assert target.read_bytes() == first, "the same records must give the same page"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "report.html"]


def test_only_a_page_of_ours_is_replaced(tmp_path):
    run = small_run(tmp_path / "run")
    metrics = (run / "metrics.jsonl").read_bytes()
    (tmp_path / "mine.html").write_text("<html><head><title>mine</title></head></html>")
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "link").symlink_to(tmp_path / "notes.txt")
    (tmp_path / "late.html").write_text(" " * 5000 + '<meta name="generator" content="foreroute">')
    os.mkfifo(tmp_path / "pipe")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    for target in (*before, run / "metrics.jsonl", tmp_path / "link"):
        with pytest.raises(InputError, match="exists and is no page that foreroute wrote; nothing was changed"):
            write_report([run], target)
    for target in (tmp_path / "pipe", tmp_path / "notes.txt" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(InputError, match="cannot be written"):
            write_report([run], target)
    with pytest.raises(InputError, match="is a folder; name the file to write"):
        write_report([run], tmp_path)
    assert {path: path.read_bytes() for path in before} == before
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert (tmp_path / "pipe").is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "link", "pipe", *(path.name for path in before)}


def test_a_page_shows_names_that_no_reader_is_misled_by(tmp_path):
    name = os.fsdecode(b"run\xff\xe2\x80\xae\x1b[2J")
    runs = [write_run(tmp_path / folder, config("twin"), [step_line(i) for i in range(3)]) for folder in ("a", name)]
    text = write_report(runs, tmp_path / f"{name}.html").read_text()
    assert r"run\udcff\u202e\x1b[2J" in text
    assert not set(text) & set("\x1b\u202e\udcff")
    again = write_report(runs, tmp_path / f"{name}.html")
    assert again.read_text() == text


def test_reading_and_rows_load_no_plotting_library():
    code = "import foreroute.report, sys; sys.exit(bool({'matplotlib', 'jinja2'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_expert_parallel_runs_show_the_load_of_their_ranks(tmp_path):
    lines = [step_line(step) | {"execution": execution(step)} for step in range(4)]
    spread = write_run(tmp_path / "spread", config("spread", routing="R3"), lines)
    alone = write_run(tmp_path / "alone", config("alone"), [step_line(step) for step in range(4)])
    page = write_report([alone, spread], tmp_path / "report.html").read_text()
    assert "Load of every rank in every micro-step, step 3 of spread" in page
    assert "every expert at its home" in page
    assert "Load of" not in write_report([alone], tmp_path / "alone.html").read_text()


def test_what_plans_did_is_averaged_over_steps(tmp_path):
    executions = [execution(step) for step in range(4)]
    lines = [step_line(step) | {"execution": each} for step, each in enumerate(executions)]
    spread = write_run(tmp_path / "spread", config("spread"), lines)
    alone = write_run(tmp_path / "alone", config("alone"), [step_line(0)])
    (row,) = load_rows(read_runs([alone, spread]))
    assert (row.position, row.label) == (1, "spread")
    at_home = sum(each["max_over_mean"]["at_home"] for each in executions) / 4
    assert row.cells == {
        "Ranks": "4",
        "Busiest rank over mean, experts at home": f"{at_home:.2f}",
        "Busiest rank over mean, by the plan": "1.00",
        "Busiest rank over mean, as executed": "1.00",
        "Replicas": "12",
        # 3 MB by host memory, and 0 to 3 MB directly
        "Weights moved": "4.5 MB",
        "Gradients moved": "5 MB",
        "Waited for transfers": "0.50\N{NO-BREAK SPACE}s",
        "Waited for plans": "0.20\N{NO-BREAK SPACE}s",
        # 0 + 1 + 2 + 3 of 6.8 seconds
        "Planning that nothing waited for": "88.2\N{NO-BREAK SPACE}%",
        "Cells that fell back to homes": "6",
    }
    page = write_report([alone, spread], tmp_path / "report.html").read_text()
    assert all(f"<dt>{name}</dt><dd>{value}</dd>" in page for name, value in row.cells.items())


def test_loads_of_a_live_run_are_not_drawn(tmp_path):
    lines = [step_line(step) | {"execution": {"ranks": 2}} for step in range(3)]
    run = write_run(tmp_path / "live", config(), lines)
    assert "Load of" not in write_report([run], tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 3}, "loads of 3 ranks"),
        ({"max_over_mean": {}}, "max_over_mean needs at_home and executed"),
        ({"stages": {"recompute": {"at_home_MLG": [[[1, 2, 3, 4]]], "executed_MLG": [[[1, 2]]]}}}, "the same numbers"),
        ({"stages": {"recompute": {"at_home_MLG": [], "executed_MLG": []}}}, "the same numbers"),
    ],
)
def test_damaged_loads_are_refused(tmp_path, change, message):
    lines = [step_line(0) | {"execution": execution(0) | change}, step_line(1)]
    run = write_run(tmp_path / "run", config(), lines)
    with pytest.raises(RunFolderError, match=message):
        write_report([run], tmp_path / "report.html")
