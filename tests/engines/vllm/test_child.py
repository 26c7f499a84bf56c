"""The server as a child of the trainer, on a fake vLLM: what comes back, and every way to fail and to end."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from foreroute.adapters.checkpoint import ServedModel
from foreroute.engines import inside_vllm, vllm, vllm_server
from foreroute.errors import CaptureError, ConfigError, EngineError
from foreroute.testing.ranks import environment
from foreroute.train import train
from tests.engines.small_policy import SAMPLING, prompts, seeded
from tests.engines.vllm.conftest import assert_ends
from tests.tiers import grid
from tests.train.small_runs import records, small_config

PAIRS = replace(SAMPLING, group_size=2)


@pytest.fixture
def started(routed, fake_settings):
    """Starts an engine on the fake; all are ended."""
    engines = []

    def start(behaviour="good", **changes):
        settings = fake_settings(behaviour, **changes)
        engines.append(vllm.VLLMEngine(ServedModel.of(routed), settings, timeout_s=60.0))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def loaded(engine, routed, version=1):
    engine.load_weights(routed.model.state_dict(), version=version)
    return engine


@grid("release", ["0.28.0", "0.30.0", "0.32.0"], quick=1)
def test_sequences_are_grouped_by_prompt_in_every_release(routed, started, monkeypatch, release):
    monkeypatch.setenv("FAKE_VLLM_VERSION", release)
    asked, engine = prompts(5, 9), loaded(started(), routed, version=4)
    first = engine.generate(asked, replace(SAMPLING, group_size=3), seeded())
    again = engine.generate(asked, replace(SAMPLING, group_size=3), seeded())
    other = engine.generate(asked, replace(SAMPLING, group_size=3), seeded(2))
    assert first.prompt_lengths.tolist() == [5] * 3 + [9] * 3
    assert (first.trace.versions, first.trace.provenance["engine_version"]) == ((4,), release)
    assert set(first.logprobs_R) == {-1.5}
    assert again.trace.equals(first.trace)
    assert not other.trace.equals(first.trace)


@grid(
    ("behaviour", "error", "said"),
    [
        ("refuses to load", EngineError, r"\(exit code 1\).*vLLM from 0\.31 on(.|\n)*Runner V2"),
        ("dies", EngineError, r"died \(signal 6, Aborted\): POST /inference(.|\n)*it serves /"),
        ("zero routes", CaptureError, "enforce_eager=True"),
    ],
    quick=1,
)
def test_what_a_server_fails_at_is_reported(routed, started, behaviour, error, said):
    engine = started(behaviour)
    with pytest.raises(error, match=said):
        loaded(engine, routed).generate(prompts(4, 40), PAIRS, seeded())
    assert bool(engine._process.exit_words()) == (behaviour in ("refuses to load", "dies"))


def test_what_a_release_needs_on_a_machine():
    cases = {
        ("0.28.1", True): ["--enforce-eager", "--no-enable-chunked-prefill"],
        ("0.30.0", True): ["--enable-scale-out", "--enforce-eager", "--no-enable-chunked-prefill"],
        ("0.31.0", True): ["--enable-scale-out", "--enforce-eager"],
        ("0.33.0", False): ["--enable-scale-out"],
    }
    for (version, is_cpu), needed in cases.items():
        assert inside_vllm.arguments_of(version, is_cpu=is_cpu, given=[]) == needed
    assert inside_vllm.arguments_of("0.33.0", is_cpu=True, given=["--enforce-eager"]) == ["--enable-scale-out"]


def test_settings_are_arguments(fake_settings):
    options = {"block_size": 32, "enable_prefix_caching": False, "aux_output_config": {"max_bytes": 9}}
    found = fake_settings(options=options, sampling_masks=True).arguments(Path("/c"), 64)
    for argument in ("--block-size=32", "--no-enable-prefix-caching", '--aux-output-config={"max_bytes": 9}'):
        assert argument in found
    assert {"--model=/c", "--max-model-len=64", "--dtype=bfloat16", "--return-sampling-mask"} <= {*found}
    assert not [argument for argument in found if "trust" in argument]
    for wrong, said in (
        ({"logprobs_mode": "raw_logprobs"}, r"logprobs_mode.*foreroute"),
        ({"trust_remote_code": True}, r"trust_remote_code.*foreroute"),
        ({"a": object()}, "vLLM option a is"),
        ({"a": float("nan")}, r"expected.*JSON.*hold"),
    ):
        with pytest.raises(ConfigError, match=said):
            fake_settings(options=wrong)


@pytest.mark.slow
def test_what_cannot_be_started_says_so(routed, started, fake_settings, tmp_path):
    with pytest.raises(EngineError, match=r"environment.*Install"):
        vllm.ServerSettings(python=tmp_path / "missing")
    bare = vllm.VLLMEngine(ServedModel.of(routed), replace(fake_settings(), python=Path(sys.executable), options={}))
    with bare, pytest.raises(EngineError, match="named 'vllm'"):
        loaded(bare, routed)
    with pytest.raises(ConfigError, match="max_model_len is 256"):
        started().generate(prompts(230), PAIRS, seeded())
    with pytest.raises(ConfigError, match=r"expected ServerSettings.*weights_folder"):
        vllm.VLLMEngine(ServedModel.of(routed), fake_settings(), weights_folder=tmp_path)
    with pytest.raises(EngineError, match=r"started.*surrogates"):
        started("\ud800")


@pytest.mark.slow
def test_a_server_that_does_not_end_is_killed_with_all_it_started(started, monkeypatch):
    """One that no signal ends but the last, and that does not end itself when its standard input closes."""
    monkeypatch.setattr(vllm_server, "GRACE_S", 0.5)
    engine = started("never ends")
    log, deadline = engine._process.folder / "server.log", time.monotonic() + 60
    while "it serves /" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    (child,) = re.findall(r"child (\d+)", log.read_text())
    closing = Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(30)
    try:
        assert not closing.is_alive()
        assert engine._process.exit_words() == "signal 9, Killed"
        assert not engine._process.folder.exists()
        assert_ends(int(child))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(engine._process._process.pid, signal.SIGKILL)


def test_a_server_removes_no_folder_that_was_not_made_for_it(tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    command = [sys.executable, "-c", "from foreroute.engines import inside_vllm; inside_vllm._end_with_trainer()"]
    server = subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, env=environment(), start_new_session=True, stderr=subprocess.PIPE
    )
    server.communicate(timeout=60)
    assert (tmp_path / "kept.txt").read_text() == "mine"


def test_a_run_steps_with_the_weights_of_each_step(fake_settings, tmp_path):
    settings = fake_settings()
    server = {"python": str(settings.python), "options": dict(settings.options), "timeout_s": 60.0}
    rollout = {"engine": "vllm", "prompts": 2, "group_size": 2, "server": server}
    warm_start, rl = {"max_steps": 1, "batch_size": 2}, {"steps": 2, "warmup_steps": 0}
    run = train(small_config(warm_start=warm_start, rollout=rollout, rl=rl), tmp_path / "run")
    assert [record["weight_version"] for record in records(run.path)] == [0, 1]
    # R3 forces the routes that the engine returned, whatever they are
    assert all(record["mismatch"]["replayed"]["differing_share"] == 0 for record in records(run.path))
    assert all(record["mismatch"]["native"]["differing_share"] > 0 for record in records(run.path))
