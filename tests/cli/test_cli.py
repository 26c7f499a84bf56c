"""The command line as a user meets it: what it prints, and exit code 2 with one message for a user's error."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from typer.main import get_command

import foreroute as fr
from foreroute.cli.demo import demo_values
from foreroute.cli.main import app
from foreroute.cli.train import Display
from foreroute.trace import DecisionStream
from foreroute.train.folder import load_checkpoint
from make import config_reference
from tests.cli.command import foreroute
from tests.mismatch import planted_defects as planted
from tests.traces import random_trace
from tests.train.small_runs import SIZES, records, small_values


def config_file(folder, **sections):
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(small_values(**sections)))
    return path


def test_version():
    command = [sys.executable, "-m", "foreroute.cli", "--version"]
    assert subprocess.check_output(command, text=True) == f"foreroute {fr.__version__}\n"


def test_a_run_without_the_libraries_of_its_page_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("foreroute.cli.terminal.DRAWN_WITH", ("no_such_library",))
    result = foreroute(
        "train", config_file(tmp_path, rl={"steps": 1}, warm_start={"max_steps": 1}), "--folder", tmp_path / "run"
    )
    assert "report      skipped: no_such_library not installed" in result.stdout
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted")
def test_a_small_demo_runs_to_its_table_and_page(tmp_path, monkeypatch):
    values = demo_values()
    values["warm_start"]["max_steps"] = 20
    values["rollout"] |= {"prompts": 4, "group_size": 4}
    values["model"]["sizes"] = dict(SIZES)
    monkeypatch.setattr("foreroute.cli.demo.demo_values", lambda: values)
    result = foreroute("demo", "--folder", tmp_path / "demo", "--steps", 1)
    assert "differing" in result.stdout
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "Comparison of 2 runs" in page
    (record,) = records(tmp_path / "demo" / "R3")
    (control,) = records(tmp_path / "demo" / "none")
    assert record["mismatch"]["replayed"]["differing_share"] == 0
    assert record["mismatch"] == control["mismatch"], "the first step has the same weights and rollouts in both runs"


def test_a_demo_samples_with_vllm_where_its_python_is_given(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr("foreroute.cli.demo.train", lambda config, *_, **__: trained.append(config) or exit(7))
    for given in ((), ("--vllm", "of-vllm/python")):
        foreroute("demo", "--folder", tmp_path / "demo", *given, code=7)
    plain, served = (config.rollout for config in trained)
    assert (plain.engine, plain.server.python) == ("embedded", None)
    assert (served.engine, served.server.python) == ("vllm", "of-vllm/python")


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted")
def test_a_run_is_stopped_resumed_reported_and_examined(tmp_path, monkeypatch):
    """A Ctrl-C behind step 2 leaves a checkpoint to resume from, and a page."""
    config, run = config_file(tmp_path, checkpoint={"every": 1000}), tmp_path / "run"
    show = Display.step

    def interrupted(display, record):
        show(display, record)
        if record.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    # who runs the tests in the background of a shell has Ctrl-C ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Display, "step", interrupted)
            stopped = foreroute("train", config, "--folder", run)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "press Ctrl-C again" in stopped.stdout
    assert "with --resume goes on" in stopped.stdout
    assert (run / "report.html").exists()
    assert len(records(run)) == 3
    folder, step = run / "checkpoints", "step-000003.safetensors"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000.safetensors", step]
    assert load_checkpoint(folder / step)["step"] == 3
    resumed = foreroute("train", config_file(tmp_path, checkpoint={"every": 2}), "--folder", run, "--resume")
    assert "goes on" not in resumed.stdout
    assert len(records(run)) == 5
    again = foreroute("report", run, "--output", tmp_path / "page.html")
    finding, page = again.stdout.splitlines()
    assert page == str(tmp_path / "page.html")
    assert f'<p class="card finding ">{finding}</p>' in (tmp_path / "page.html").read_text()
    assert " ".join(finding.split()) in resumed.said, "train says it as well"
    shown = foreroute("inspect", run / "rollouts" / "step-000000.safetensors")
    assert "top-2 of 16 experts in 2 layers" in shown.stdout
    assert "pick order" in shown.stdout
    assert re.search(r"24, of \d+ to \d+ tokens", shown.stdout)
    assert "decoder 1" in shown.stdout
    examined = foreroute("doctor", "--model", run)
    (recorded,) = [record["mismatch"] for record in records(run) if record["step"] == 4]
    assert recorded["native"]["k3"] > recorded["replayed"]["k3"] > 0
    for side in ("native", "replayed"):
        assert f"{recorded[side]['k3']:.2e}" in examined.said, (recorded, examined.stdout)


def test_validate_says_of_each_file_whether_it_is_sound(tmp_path):
    good = fr.save(random_trace(0), tmp_path / "good")
    bad = tmp_path / "bad"
    bad.write_bytes(good.read_bytes()[:-1])
    result = foreroute("validate", good, bad, code=2)
    assert f"sound    {good}" in result.stdout
    assert f"refused  {bad}" in result.stdout
    foreroute("validate", good)


def test_diff_names_a_defect(tmp_path):
    rng, own = planted.case(0)
    trace, shifted = fr.save(own, tmp_path / "a"), fr.save(planted.shift(rng, own)[0], tmp_path / "b")
    assert "shift" in foreroute("diff", trace, shifted, code=1).stdout
    late_N = np.arange(own.num_rows) - np.repeat(own.offsets[:-1], own.lengths) > 3
    ids_NLK, num_experts = own.expert_ids_NLK, own.spec.sizes_L[0][0]
    picked_NLE = (ids_NLK[..., None] == np.arange(num_experts)).any(axis=2)
    others_NLK = np.argsort(picked_NLE, axis=2, kind="stable")[..., : ids_NLK.shape[2]].astype(ids_NLK.dtype)
    parted = replace(own, expert_ids_NLK=np.where(late_N[:, None, None], others_NLK, ids_NLK))
    shown = foreroute("diff", trace, fr.save(parted, tmp_path / "parted"), code=None).stdout
    assert re.findall(r"(\d+ to \d+) \S +([\d.]+%)", shown)[:2] == [("0 to 3", "100.00%"), ("4 to 8", "0.00%")]
    foreroute("diff", trace, fr.save(random_trace(1), tmp_path / "c"), code=2)


def test_diff_names_sets_that_differ_are_missing_or_are_of_other_tokens(tmp_path):
    plain = random_trace(3)
    next_N = np.append(plain.token_ids_N[1:], 0)
    valid = np.ones(plain.num_rows, bool)
    valid[plain.offsets[1:][plain.lengths > 0] - 1] = False
    choices = int(plain.token_ids_N.max()) + 3

    def saved(name, ids_N2):
        masks = DecisionStream.from_sets(choices, valid, 2 * valid, ids_N2[valid].reshape(-1))
        return fr.save(plain.with_stream("sampling", masks), tmp_path / name)

    own = np.stack([next_N, next_N + 1], axis=1)
    other = own.copy()
    row = int(np.flatnonzero(valid)[-1])
    sequence = int(np.searchsorted(plain.offsets, row, side="right")) - 1
    other[row, 1] += 1
    saved("first", own), saved("second", other), saved("wrong", (own + 1) % choices), fr.save(plain, tmp_path / "plain")
    position = f"position {row - plain.offsets[sequence]} of sequence {sequence}"
    for reference, compared, code, said in (
        ("first", "second", 0, position),  # a trainer's own sets differ by rounding
        ("first", "plain", 1, "the other trace has none"),
        ("first", "wrong", 1, "leave out the token that was sampled"),
    ):
        assert said in foreroute("diff", tmp_path / reference, tmp_path / compared, code=code).said


def test_inspect_shows_facts_and_claims_apart_and_obeys_neither(tmp_path):
    lie = {"digest": "0" * 32, "rows": "1,000,000\nsequences  9", "\x1b]0;title\x07": "\u202e[bold]x"}
    trace = random_trace(0).with_provenance(**lie)
    trace = replace(trace, spec=replace(trace.spec, model="\x1b[2Jmodel"))
    path = fr.save(trace, tmp_path / "a\x1b[31m\nb")
    shown = foreroute("inspect", path, columns=200).stdout
    assert not set(shown) & {"\x1b", "\x07", "\u202e"}
    lines = [line.strip() for line in shown.splitlines()]
    assert r"\x1b[2Jmodel" in shown
    assert "a\\x1b[31m\\nb" in shown.replace("\n", "")
    [rows] = [line for line in lines if line.startswith("rows ")]
    assert f"{trace.num_rows}, of which" in rows
    assert sum("provenance: " in line for line in lines) == 3
    assert r"1,000,000\nsequences  9" in shown
    narrow = foreroute("inspect", path, columns=0).stdout  # at which Rich prints nothing
    assert narrow == foreroute("inspect", path, columns=40).stdout
    foreroute("inspect", path, columns="²")
    said = foreroute("validate", path, columns=200).stdout
    assert said.count("\n") == 1
    assert "\x1b" not in said


def test_options_are_few_and_each_is_given_in_a_test():
    """What an option does, the test that gives it sees; one that no test gives to its verb is one too many."""
    files = [(path.name, path.read_text(encoding="utf-8")) for path in Path(__file__).parents[1].rglob("*.py")]
    # two empty lines are between tests, and a file may be named after its verb
    parts = [name + part for name, text in files for part in text.split("\n\n\n") if "--" in part]
    root = get_command(app)
    flags = [
        (name, [*parameter.opts, *parameter.secondary_opts])
        for name, command in {"": root, **root.commands}.items()
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name != "help"
    ]
    assert len(flags) <= 35
    given = {(verb, *names) for verb, names in flags if any(verb in p and any(n in p for n in names) for p in parts)}
    assert {(verb, *names) for verb, names in flags} == given


def test_the_keys_of_the_pages_are_up_to_date():
    for page, text in config_reference.pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name}: run make config-reference"
