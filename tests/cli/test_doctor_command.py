"""`foreroute doctor` as a user meets it."""

import html
import json
import re
import shlex
from dataclasses import replace

import pytest

import foreroute as fr
from foreroute.adapters import hf
from foreroute.capture import load_generation, save_generation
from foreroute.doctor.examine import examine
from foreroute.testing.models import tiny
from foreroute.train import RunFolder, parse_config, train
from foreroute.train.chain import VOCABULARY
from tests.cli.command import foreroute, refused
from tests.doctor.doctor_cases import generation, shifted
from tests.tiers import grid
from tests.train.small_runs import small_values


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model folder, a rollout, and what the trainer computes for it: generations, and traces alone."""
    folder = tmp_path_factory.mktemp("doctor")
    model = tiny("qwen3_moe")
    model.save_pretrained(folder / "model")
    good = generation(model, "bfloat16")
    evidence = examine(model, good)
    native = evidence.native
    passes = {
        "bf16": good,
        "shifted": shifted(good),
        "native": replace(good, trace=native.executed, logprobs_R=native.logprobs_R),
        "replayed": replace(good, logprobs_R=evidence.replayed.logprobs_R),
    }
    for name, each in passes.items():
        save_generation(each, folder / f"{name}.generation")
    fr.save(good.trace, folder / "bf16.trace")
    fr.save(native.executed, folder / "native.trace")
    tokens = [native.executed.tokens(s) for s in range(len(native.executed))]
    fr.save(fr.RoutingTrace.unrouted(native.executed.spec, tokens), folder / "unrouted.trace")
    return folder


def doctor(*arguments, **options):
    return foreroute("doctor", *arguments, **options)


def commands(page):
    return [shlex.split(html.unescape(line)) for line in re.findall(r"<code>foreroute (.*)</code>", page.read_text())]


@pytest.mark.usefixtures("unpainted")
def test_a_model_folder_and_a_rollout(files, tmp_path):
    page = tmp_path / "page.html"
    sides = "--model", files / "model", "--rollout", files / "bf16.generation"
    result = doctor(*sides, "--explain", "--output", page)
    assert "carry the most of routing's part of k3" in result.said
    assert "Which flips make the gap" in page.read_text()
    assert "R3 helps by a factor of" in result.stdout
    assert "Replay is wired" in result.stdout
    assert "R3 helps by a factor of" in page.read_text()
    passes = [f"--{name}={files / f'{file}.generation'}" for name, file in
              (("rollout", "bf16"), ("trainer", "native"), ("replayed", "replayed"))]  # fmt: skip
    assert doctor(*passes).stdout.splitlines()[0] == result.stdout.splitlines()[0], "the trainer's passes say the same"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run leaves: its configuration, checkpoints of two steps, and the rollout of the second one."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    values = small_values(rollout={"prompts": 6, "group_size": 4, "temperature": 0.7})
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(parse_config(values, source="test").model_dump()))
    for step in (0, 20):
        model = hf.build_model("qwen3_moe", seed=step, **{**values["model"]["sizes"], "vocab_size": len(VOCABULARY)})
        state = {"step": step, "model": model.state_dict(), "optimizer": {"state": {}}}
        RunFolder(folder).save_checkpoint(state, data="", keep=2)
    good = generation(model, "bfloat16", temperature=0.7, below=len(VOCABULARY) - 1)
    good = replace(good, trace=good.trace.with_weight_version(20))
    save_generation(good, folder / "rollouts" / "step-000020.safetensors")
    return folder


@pytest.mark.slow
def test_a_run_folder_is_examined_at_the_checkpoint_of_its_rollout(run, tmp_path):
    result = doctor("--model", run)
    assert result.stdout.startswith(f"examined: step 20 of {small_values()['rl']['steps']}\n")
    assert "R3 helps by a factor of" in result.said
    assert "Also on the engine's routes" not in result.said, "the temperature is the configuration's"
    named = doctor("--model", run / "config.json", "--rollout", run / "rollouts" / "step-000020.safetensors")
    assert named.said == result.said
    stale = doctor("--model", run, "--weight-version", "0", code=1)
    assert "its rows are of weight version 20, and the trainer is at 0" in stale.said
    trace = load_generation(run / "rollouts" / "step-000020.safetensors").trace
    fr.save(trace.with_weight_version(7), tmp_path / "seven")
    refused("those of 0, 20", "doctor", "--model", run, "--rollout", tmp_path / "seven")


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted")
def test_the_page_of_a_run_and_that_of_its_diagnosis_name_each_other_in_commands_that_run(tmp_path):
    values = small_values(rl={"steps": 3, "micro_step_tokens": 64, "warmup_steps": 2})
    train(parse_config(values, source="test"), tmp_path / "a run")
    foreroute("report", "a run", cwd=tmp_path)
    (examine_it,) = commands(tmp_path / "a run" / "report.html")
    assert examine_it[0] == "doctor"
    result = foreroute(*examine_it, cwd=tmp_path)
    assert re.search(r"k3 goes from \d\.\d+e-\d+ to \d\.\d+e-\d+ nats", result.said), result.said
    (draw_it,) = commands(tmp_path / "a run" / "doctor.html")
    assert f"foreroute {shlex.join(draw_it)}" in result.stdout
    (tmp_path / "a run" / "report.html").unlink()
    foreroute(*draw_it, cwd=tmp_path)
    assert commands(tmp_path / "a run" / "report.html") == [examine_it]


PASSES = "--rollout bf16.generation --trainer native.generation"


@grid(
    ("words", "message"),
    [
        ("", "no two sides to compare"),
        ("--rollout unrouted.trace --trainer native.trace", "no row is routed on both sides"),
        ("--model model --trainer native.trace", "do not give"),
        ("--model Qwen/Qwen3-30B-A3B", "Nothing is downloaded: hf download"),
        (f"{PASSES} --replayed short.generation", "short.generation holds other tokens than the rollout"),
        (f"{PASSES} --replayed bf16.trace", "is a trace without log-probs"),
        ("--model model --rollout bf16.trace --explain", "--explain needs the engine's log-probs"),
        ("--model model --temperature 1 --max-sequences 2", "--temperature, --max-sequences change nothing without"),
    ],
    quick=4,
)
def test_wrong_input_is_one_message_and_exit_code_2(files, words, message):
    short = load_generation(files / "bf16.generation").select([0, 1])
    save_generation(short, files / "short.generation", overwrite=True)
    refused(message, "doctor", *words.split(), cwd=files)
