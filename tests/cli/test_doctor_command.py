"""`foreroute doctor` as a user meets it."""

import html
import json
import re
import shlex
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tomli_w
import torch

import foreroute as fr
from foreroute.adapters import hf
from foreroute.capture import load_generation, save_generation
from foreroute.cli import doctor_inputs
from foreroute.cli.doctor import run_doctor
from foreroute.cli.doctor_inputs import DoctorInputs
from foreroute.doctor import Severity
from foreroute.doctor.examine import examine
from foreroute.errors import InputError, RunFolderError
from foreroute.testing.models import tiny
from foreroute.train import RunFolder, parse_config, train
from foreroute.train.chain import VOCABULARY
from tests.cli.command import foreroute
from tests.doctor.doctor_cases import generation, shifted
from tests.train.small_runs import SIZES, small_values

OPTIONS = {"temperature": None, "weight_version": None, "max_sequences": 64}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model folder, a generation, and the same as loose files."""
    folder = tmp_path_factory.mktemp("doctor")
    model = tiny("qwen3_moe")
    model.save_pretrained(folder / "model")
    good = generation(model, "bfloat16")
    save_generation(good, folder / "bf16.safetensors")
    fr.save(good.trace, folder / "bf16.trace.safetensors")
    save_generation(shifted(good), folder / "shifted.safetensors")
    evidence = examine(model, good)
    np.save(folder / "engine.npy", good.logprobs_R)
    np.save(folder / "prompts.npy", good.prompt_lengths)
    np.save(folder / "native.npy", evidence.native.logprobs_R)
    np.save(folder / "replayed.npy", evidence.replayed.logprobs_R)
    fr.save(evidence.native.executed, folder / "native.safetensors")
    return folder


def save_unrouted(files):
    """The trainer's tokens without a route."""
    trace = fr.load(files / "native.safetensors")
    unrouted = fr.RoutingTrace.unrouted(trace.spec, [trace.tokens(s) for s in range(len(trace))])
    fr.save(unrouted, files / "unrouted.safetensors", overwrite=True)


def doctor(*arguments, **options):
    return foreroute("doctor", *arguments, **options)


def test_a_model_folder_and_a_generation(files, tmp_path):
    page = tmp_path / "page.html"
    result = doctor("--model", files / "model", "--generation", files / "bf16.safetensors", "--output", page)
    assert result.returncode == 0, result.stderr
    assert "R3 helps by a factor of" in result.stdout
    assert "Replay is wired" in result.stdout
    assert commands(page) == []
    assert "R3 helps by a factor of" in page.read_text()


def test_a_problem_is_exit_code_1(files):
    result = doctor("--model", files / "model", "--generation", files / "shifted.safetensors")
    assert result.returncode == 1, result.stderr
    assert "shifted by +1 token:" in result.stdout


def test_loose_files_say_the_same(files, capsys):
    trace, engine = files / "bf16.trace.safetensors", files / "engine.npy"
    loose = DoctorInputs(model=files / "model", trace=trace, logprobs=engine, prompt_lengths=files / "prompts.npy")
    assert run_doctor(loose, None, **OPTIONS) is Severity.NOTE
    with_model = capsys.readouterr().out.splitlines()[0]
    passes = DoctorInputs(
        trace=trace,
        logprobs=engine,
        trainer_trace=files / "native.safetensors",
        trainer_logprobs=files / "native.npy",
        replayed_logprobs=files / "replayed.npy",
    )
    assert run_doctor(passes, None, **OPTIONS) is Severity.NOTE
    assert capsys.readouterr().out.splitlines()[0] == with_model


def test_a_configuration_alone_is_enough_for_the_wiring(files, capsys):
    assert run_doctor(DoctorInputs(model=files / "model" / "config.json"), None, **OPTIONS) is Severity.NOTE
    out = capsys.readouterr().out
    assert "Replay is wired" in out
    assert "No weights were given" in out


def test_a_toml_of_the_trainer_with_and_without_checkpoint(tmp_path, capsys):
    values = small_values()
    (tmp_path / "run.toml").write_text(tomli_w.dumps(values))
    model = hf.build_model("qwen3_moe", seed=7, **{**values["model"]["sizes"], "vocab_size": len(VOCABULARY)})
    state = {"step": 0, "model": model.state_dict(), "optimizer": {"state": {}}}
    shutil.copy(RunFolder(tmp_path / "made").save_checkpoint(state, data="", keep=1), tmp_path / "step")
    assert run_doctor(DoctorInputs(model=tmp_path / "run.toml"), None, **OPTIONS) is Severity.NOTE
    assert "stands for the weights before step 0" in " ".join(capsys.readouterr().out.split())
    inputs = DoctorInputs(model=tmp_path / "run.toml", checkpoint=tmp_path / "step")
    assert run_doctor(inputs, None, **OPTIONS) is Severity.FINE
    capsys.readouterr()
    trainer = doctor_inputs.read_trainer(inputs, None)
    assert (trainer.has_weights, trainer.weight_version) == (True, 0)
    assert torch.equal(trainer.model.lm_head.weight, model.lm_head.weight)
    (tmp_path / "other.toml").write_text(tomli_w.dumps(small_values(model={"sizes": {**SIZES, "hidden_size": 16}})))
    with pytest.raises(InputError, match=r"step does not fit the model of .*other\.toml"):
        doctor_inputs.read_trainer(replace(inputs, model=tmp_path / "other.toml"), None)
    sealed = (tmp_path / "step").read_bytes()
    (tmp_path / "step").write_bytes(sealed[:-6] + bytes([sealed[-6] ^ 1]) + sealed[-5:])  # a weight of the model
    with pytest.raises(RunFolderError, match=r"step is damaged: its checksum"):
        doctor_inputs.read_trainer(inputs, None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run leaves: its configuration, checkpoints of two steps, and the rollout of the second one."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    values = small_values(rollout={"prompts": 6, "group_size": 4, "temperature": 0.7})
    config = parse_config(values, source="test")
    (folder / "checkpoints").mkdir(parents=True)
    (folder.parent / "run.toml").write_text(tomli_w.dumps(values))
    (folder / "config.json").write_text(json.dumps(config.model_dump()))
    for step in (0, 20):
        model = hf.build_model("qwen3_moe", seed=step, **{**values["model"]["sizes"], "vocab_size": len(VOCABULARY)})
        state = {"step": step, "model": model.state_dict(), "optimizer": {"state": {}}}
        RunFolder(folder).save_checkpoint(state, data="", keep=2)
    good = generation(model, "bfloat16", temperature=0.7, below=len(VOCABULARY) - 1)
    good = replace(good, trace=good.trace.with_weight_version(20))
    save_generation(good, folder / "rollouts" / "step-000020.safetensors")
    return folder


def words(result):
    return " ".join(result.stdout.split())


def test_a_run_folder_is_examined_at_the_checkpoint_of_its_rollout(run):
    rollout = run / "rollouts" / "step-000020.safetensors"
    result = doctor("--model", run, "--generation", rollout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "R3 helps by a factor of" in words(result)
    assert "Also on the engine's routes" not in words(result), "the temperature is the configuration's"
    named = doctor(
        "--model", run.parent / "run.toml", "--checkpoint", run / "checkpoints" / "step-000020.safetensors",
        "--generation", rollout,
    )  # fmt: skip
    assert words(named) == words(result)
    assert words(doctor("--model", run / "config.json", "--generation", rollout)) == words(result)


def test_the_folder_of_a_run_alone_is_enough(tmp_path):
    values = small_values(rl={"steps": 3, "micro_step_tokens": 64, "warmup_steps": 2})
    train(parse_config(values, source="test"), tmp_path / "run")
    result = doctor("--model", tmp_path / "run")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"k3 goes from \d\.\d+e-\d+ to \d\.\d+e-\d+ nats", words(result)), words(result)
    fr.save(
        load_generation(tmp_path / "run" / "rollouts" / "step-000002.safetensors").trace, tmp_path / "trace.safetensors"
    )
    (tmp_path / "run.toml").write_text(tomli_w.dumps(values))
    without = doctor("--model", tmp_path / "run.toml", "--trace", tmp_path / "trace.safetensors", cwd=tmp_path)
    assert without.returncode == 1
    assert "weight version 2, which are other weights" in words(without)


def commands(page):
    return [shlex.split(html.unescape(line)) for line in re.findall(r"<code>foreroute (.*)</code>", page.read_text())]


def test_the_page_of_a_run_and_that_of_its_diagnosis_name_each_other_in_commands_that_run(tmp_path):
    values = small_values(rl={"steps": 2, "micro_step_tokens": 64, "warmup_steps": 1})
    train(parse_config(values, source="test"), tmp_path / "a run")
    assert foreroute("report", "a run", cwd=tmp_path).returncode == 0
    (examine_it,) = commands(tmp_path / "a run" / "report.html")
    assert examine_it[0] == "doctor"
    result = foreroute(*examine_it, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    (draw_it,) = commands(tmp_path / "a run" / "doctor.html")
    assert f"foreroute {shlex.join(draw_it)}" in result.stdout
    (tmp_path / "a run" / "report.html").unlink()
    assert foreroute(*draw_it, cwd=tmp_path).returncode == 0
    assert commands(tmp_path / "a run" / "report.html") == [examine_it]
    for rollout in (tmp_path / "a run" / "rollouts").iterdir():
        rollout.unlink()
    assert foreroute(*draw_it, cwd=tmp_path).returncode == 0
    assert commands(tmp_path / "a run" / "report.html") == [], "there is nothing to examine"


def test_diff_and_the_diagnosis_of_two_traces_name_each_other_in_commands_that_run(files, tmp_path):
    for name in ("native", "bf16.trace"):
        shutil.copy(files / f"{name}.safetensors", tmp_path)
    result = foreroute("diff", "native.safetensors", "bf16.trace.safetensors", cwd=tmp_path)
    (line,) = re.findall(r"foreroute (doctor .*)", result.stdout)
    assert foreroute(*shlex.split(line), cwd=tmp_path).returncode == 0
    (compare,) = commands(tmp_path / "doctor.html")
    assert compare == ["diff", "native.safetensors", "bf16.trace.safetensors"]
    assert foreroute(*compare, cwd=tmp_path).stdout == result.stdout


def test_a_diff_without_a_common_routed_row_is_refused(files):
    save_unrouted(files)
    for other in ("native", "unrouted"):
        result = foreroute("diff", files / "unrouted.safetensors", files / f"{other}.safetensors")
        assert result.returncode == 2, result.stdout
        assert "no row is routed in both traces" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=["no sequence", "no token"])
def test_two_traces_without_a_row_are_refused_by_both_verbs(lengths, tmp_path):
    spec = fr.RoutingSpec(8, 2, (fr.RoutedLayer(0),))
    path = fr.save(fr.RoutingTrace.unrouted(spec, [np.zeros(n, np.int32) for n in lengths]), tmp_path / "t")
    for result in (foreroute("diff", path, path), doctor("--trainer-trace", path, "--trace", path)):
        assert result.returncode == 2, result.stdout
        assert "nothing to compare" in result.stderr


def test_a_configuration_without_its_checkpoint_is_a_problem_that_names_it(run):
    rollout = run / "rollouts" / "step-000020.safetensors"
    result = doctor("--model", run.parent / "run.toml", "--generation", rollout, "--weight-version", "20")
    assert result.returncode == 1, result.stdout + result.stderr
    said = words(result)
    assert "run.toml stands for the weights before step 0" in said
    assert "The trace is of weight version 20" in said
    assert "Add --checkpoint" in said
    assert "step-000020.safetensors to examine the weights of version 20" in said


def test_a_checkpoint_of_another_step_is_said_to_be_one(run):
    rollout = run / "rollouts" / "step-000020.safetensors"
    result = doctor(
        "--model", run, "--checkpoint", run / "checkpoints" / "step-000000.safetensors", "--generation", rollout
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "its rows are of weight version 20, and the trainer is at 0" in words(result)


def test_a_run_without_the_checkpoint_of_a_rollout_says_which_it_has(run, tmp_path):
    other = generation(tiny("qwen3_moe"), below=16)
    fr.save(other.trace.with_weight_version(7), tmp_path / "seven.safetensors")
    result = doctor("--model", run, "--trace", tmp_path / "seven.safetensors")
    assert result.returncode == 2
    assert "no checkpoint of weight version 7" in result.stderr
    assert "those of 0, 20" in result.stderr


def test_nearly_all_routes_being_others_is_exit_code_1(files, tmp_path):
    trace = fr.load(files / "native.safetensors")
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((trace.num_rows, trace.spec.num_layers, trace.spec.num_experts)))
    ids = np.where(trace.valid_N[:, None, None], ids[..., : trace.spec.top_k], 0).astype(trace.spec.id_dtype)
    fr.save(replace(trace, expert_ids_NLK=ids), tmp_path / "other.safetensors")
    result = doctor("--trace", tmp_path / "other.safetensors", "--trainer-trace", files / "native.safetensors")
    assert result.returncode == 1, result.stdout
    assert "no known defect is the cause" in words(result)
    assert "Compare one sequence by hand" not in words(result)


def test_sequences_in_another_order_are_told_and_not_refused(files, tmp_path):
    trace = fr.load(files / "native.safetensors")
    fr.save(trace.select(np.arange(len(trace))[::-1]), tmp_path / "reversed.safetensors")
    result = doctor("--trace", tmp_path / "reversed.safetensors", "--trainer-trace", files / "native.safetensors")
    assert result.returncode == 1, result.stderr
    assert "in another order, tokens included" in words(result)


def test_sequences_of_one_token_are_left_out(files, tmp_path):
    trace = fr.load(files / "native.safetensors")
    lengths = trace.lengths.copy()
    lengths[0] = 1
    fr.save(trace.truncated(lengths), tmp_path / "short.safetensors")
    assert doctor("--model", files / "model", "--trace", tmp_path / "short.safetensors").returncode == 0
    fr.save(trace.truncated(np.ones_like(lengths)), tmp_path / "none.safetensors")
    result = doctor("--model", files / "model", "--trace", tmp_path / "none.safetensors")
    assert (result.returncode, "no sequence of two tokens" in result.stderr) == (2, True)


def test_fewer_sequences_are_examined_when_asked(files, capsys):
    inputs = DoctorInputs(model=files / "model", generation=files / "bf16.safetensors")
    run_doctor(inputs, None, **{**OPTIONS, "max_sequences": 2})
    part = load_generation(inputs.generation).select(np.arange(2))
    assert f"over {len(part.logprobs_R)} response tokens" in " ".join(capsys.readouterr().out.split())


def nothing(files):
    return [], "no trainer to examine"


def no_engine(files):
    return ["--trainer-logprobs", files / "native.npy"], "no engine to compare with"


def both(files):
    return ["--model", files / "model", "--trainer-logprobs", files / "native.npy"], "do not give them as well"


def no_config(files):
    return ["--model", files], "holds no config.json"


def name_on_the_hub(files):
    return ["--model", "Qwen/Qwen3-30B-A3B"], "Nothing is downloaded: hf download"


def no_array(files):
    return (
        ["--trace", files / "bf16.trace.safetensors", "--trainer-logprobs", files / "model" / "config.json"],
        "not a readable .npy file",
    )


def wrong_size(files):
    return (
        ["--logprobs", files / "engine.npy", "--trainer-logprobs", files / "short.npy"],
        "log-probs of the trainer have shape (3,)",
    )


def wrong_type(files):
    return ["--logprobs", files / "prompts.npy", "--trainer-logprobs", files / "native.npy"], "expected floats"


def impossible(files):
    return ["--logprobs", files / "above.npy", "--trainer-logprobs", files / "native.npy"], "the engine hold 7.0"


def unrouted(files):
    return ["--trace", files / "unrouted.safetensors", "--trainer-trace", files / "native.safetensors"], "to compare"


def one_sided(files):
    return ["--trace", files / "bf16.trace.safetensors", "--trainer-logprobs", files / "native.npy"], "to compare"


def no_tokens(files):
    return ["--logprobs", files / "empty.npy", "--trainer-logprobs", files / "empty.npy"], "to compare"


def not_a_generation(files):
    return ["--model", files / "model", "--generation", files / "bf16.trace.safetensors"], "is no generation file"


@pytest.mark.parametrize(
    "case",
    [
        *(nothing, no_engine, both, no_config, name_on_the_hub, no_array, wrong_size, wrong_type, not_a_generation),
        *(impossible, unrouted, one_sided, no_tokens),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(files, case):
    np.save(files / "short.npy", np.zeros(3, np.float32))
    np.save(files / "empty.npy", np.zeros(0, np.float32))
    engine = np.load(files / "engine.npy")
    engine[3] = 7.0
    np.save(files / "above.npy", engine)
    save_unrouted(files)
    arguments, message = case(files)
    result = doctor(*arguments)
    assert result.returncode == 2, result.stdout
    assert message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "given",
    [
        {"model": "m", "generation": "g", "trace": "t"},
        {"model": "m", "trace": "t", "logprobs": "l"},
        {"model": "m", "logprobs": "l", "prompt_lengths": "p"},
        {"trainer_logprobs": "a", "logprobs": "b", "checkpoint": "c"},
    ],
)
def test_combinations_that_say_two_things_at_once_are_refused(given):
    from pathlib import Path

    with pytest.raises(InputError):
        DoctorInputs(**{name: Path(value) for name, value in given.items()})
