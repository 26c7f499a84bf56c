"""`foreroute doctor` as a user meets it."""

import numpy as np
import pytest
import tomli_w
import torch
from command import foreroute

import foreroute as fr
from doctor_cases import generation, shifted
from foreroute.adapters import hf
from foreroute.capture import save_generation
from foreroute.cli import doctor_inputs
from foreroute.cli.doctor import run_doctor
from foreroute.cli.doctor_inputs import DoctorInputs
from foreroute.conformance.diagnosis import Severity
from foreroute.conformance.examine import examine
from foreroute.errors import InputError
from foreroute.train.checkpoint import Checkpoint, write_checkpoint
from foreroute.train.tasks.chain import VOCABULARY
from models import tiny
from small_runs import small_values

OPTIONS = {"temperature": 1.0, "weight_version": None, "max_sequences": 64}


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


def doctor(*arguments):
    return foreroute("doctor", *arguments)


def test_a_model_folder_and_a_generation(files, tmp_path):
    page = tmp_path / "page.html"
    result = doctor("--model", files / "model", "--generation", files / "bf16.safetensors", "--output", page)
    assert result.returncode == 0, result.stderr
    assert "R3 helps by a factor of" in result.stdout
    assert "Replay is wired" in result.stdout
    assert "R3 helps by a factor of" in page.read_text()


def test_a_problem_is_exit_code_1(files):
    result = doctor("--model", files / "model", "--generation", files / "shifted.safetensors")
    assert result.returncode == 1, result.stderr
    assert "shifted by +1 tokens" in result.stdout


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
    write_checkpoint(tmp_path / "step", Checkpoint({"step": 0, "model": model.state_dict()}, "", ""))
    assert run_doctor(DoctorInputs(model=tmp_path / "run.toml"), None, **OPTIONS) is Severity.NOTE
    inputs = DoctorInputs(model=tmp_path / "run.toml", checkpoint=tmp_path / "step")
    assert run_doctor(inputs, None, **OPTIONS) is Severity.FINE
    capsys.readouterr()
    read, has_weights = doctor_inputs.read_model(inputs.model, inputs.checkpoint)
    assert has_weights
    assert torch.equal(read.lm_head.weight, model.lm_head.weight)


def test_fewer_sequences_are_examined_when_asked(files, capsys):
    inputs = DoctorInputs(model=files / "model", generation=files / "bf16.safetensors")
    run_doctor(inputs, None, **{**OPTIONS, "max_sequences": 2})
    assert "Measures" in capsys.readouterr().out


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


def not_a_generation(files):
    return ["--model", files / "model", "--generation", files / "bf16.trace.safetensors"], "is not a generation"


@pytest.mark.parametrize(
    "case", [nothing, no_engine, both, no_config, name_on_the_hub, no_array, wrong_size, wrong_type, not_a_generation]
)
def test_wrong_input_is_one_message_and_exit_code_2(files, case):
    np.save(files / "short.npy", np.zeros(3, np.float32))
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
