"""verl whole, under Ray: its trainer on two ranks, its vLLM servers, its checkpoints. A run takes three minutes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")
pytest.importorskip("ray", reason="there is no Ray in this environment: run `make night PART=verl`")

ROOT = Path(__file__).parents[3]
WITHIN_S = 1500
"""Five times what a run takes on two quiet cores."""
ENDS_WITHIN_S = 180
"""Of the death of a process that it needs, on two busy cores."""
sys.path.append(str(ROOT / "examples" / "verl"))
import demo_cluster

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.megatron"
ROLLOUT = "actor_rollout_ref.rollout"
CUT = [
    f"{ROLLOUT}.top_p=0.7",
    f"{ROLLOUT}.top_k=258",
    f"{ROLLOUT}.val_kwargs.top_k=1",
    f"{ROLLOUT}.val_kwargs.temperature=1",
    f"+{ROLLOUT}.engine_kwargs.vllm.return_sampling_mask=True",
    f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=tests.trainers.verl.masks_on_cpu.WorkerExtension",
    "data.max_response_length=16",
    "data.val_max_samples=8",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
]
"""Sampling from a part of the tiny vocabulary, and greedy validation after the second step."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "policy"
    demo_cluster.prepare(folder)
    return folder


def run(folder, policy, *, until=None, **settings):
    """A run to its end, or until something is so; what verl ended with."""
    process = demo_cluster.start(folder, policy, **settings)
    end = time.monotonic() + WITHIN_S
    try:
        while process.poll() is None and time.monotonic() < end and not (until and until()):
            time.sleep(0.5)
        assert process.poll() is not None or (until and until()), demo_cluster.tail(folder)
    finally:
        stop(process)
    return process.returncode


def stop(process):
    """And its Ray cluster, which goes with it."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_checkpoint(folder):
    """The step of the last one that is whole; 0 before the first."""
    latest = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(latest.read_text() or 0) if latest.exists() else 0


def resumed(folder, policy, step, **settings):
    """The metrics of a run that goes on from the checkpoint of a step, for another one."""
    overrides = [f"trainer.total_training_steps={step + 1}"]
    assert run(folder, policy, overrides=overrides, **settings) == 0, demo_cluster.tail(folder)
    [(last, values)] = demo_cluster.metrics(folder).items()
    assert last == step + 1
    # a sync before the step and after it, to every engine, of all the policy's tensors
    syncs = 2 * demo_cluster.RANKS
    assert demo_cluster.differing_weights(folder, policy, first=step) == ([], syncs * num_tensors(policy))
    return values


@pytest.mark.parametrize(("engine", "precision", "below"), [("fsdp2", "float32", 1e-9), ("megatron", "bfloat16", 2e-3)])
def test_a_run_that_loses_one_process_after_another_ends_each_time_and_goes_on_from_its_checkpoint(
    tmp_path, engine, precision, below
):
    policy, folder = tmp_path / "policy", tmp_path / "run"
    demo_cluster.prepare(policy, engine)
    settings = {"precision": precision, "replay": "R3", "engine": engine}
    endless = ["trainer.total_training_steps=1000"]
    step = 0
    for killed in ("vLLMHttpServer", "WorkerDict"):
        first, overdue = step, killing(killed, folder, after=step + 2)
        code = run(folder, policy, until=overdue, overrides=endless, **settings)
        assert code not in (0, None), killed
        assert not overdue(), killed
        assert "ActorDiedError" in demo_cluster.tail(folder, 80), killed
        step = last_checkpoint(folder)
        found = demo_cluster.metrics(folder)
        assert list(found) == [*range(first + 1, first + len(found) + 1)]
        assert found[first + 1]["disagreement"] == 0
        assert demo_cluster.differing_weights(folder, policy, first=first)[0] == []
        for file in (folder / "engines").iterdir():
            file.unlink()
    values = resumed(folder, policy, step, **settings)
    assert values["disagreement"] == 0
    assert values["k3"] < below
    if engine == "megatron":
        assert values["rows_off"] == 0
        assert values["imbalance_executed"] == values["imbalance_planned"] < values["imbalance_static"]
        assert values["imbalance_first"] > 1


def killing(process, folder, *, after):
    """Kills a process of this kind when there is the checkpoint of a step. Says from when on the run is overdue."""
    killed_at = []

    def overdue():
        if not killed_at and last_checkpoint(folder) >= after:
            killed_at.append(time.monotonic())
            pid = re.search(rf"\({process} pid=(\d+)\)", (folder / "output.txt").read_text())[1]
            os.kill(int(pid), signal.SIGKILL)
        return bool(killed_at) and time.monotonic() > killed_at[0] + ENDS_WITHIN_S

    return overdue


def test_a_sync_that_leaves_the_experts_without_their_weights_ends_the_run(tmp_path, policy):
    code = run(
        tmp_path,
        policy,
        precision="float32",
        replay="R3",
        paths=[ROOT],
        overrides=[
            "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls="
            "tests.trainers.verl.packed_experts.WorkerExtension"
        ],
    )
    assert code not in (0, None)
    assert "EngineError: the rollout's log-probs are" in (tmp_path / "output.txt").read_text()
    assert demo_cluster.metrics(tmp_path) == {}  # before anything was learned from it
    different, _ = demo_cluster.differing_weights(tmp_path, policy)
    assert {name.split(".mlp.")[1] for _, _, name in different} == {"experts.gate_up_proj", "experts.down_proj"}


@pytest.mark.parametrize(
    ("engine", "libraries", "k3"),
    [
        ("fsdp2", "fsdp,foreroute.trainers.verl.sampling_masks", (0, 1e-9)),
        ("fsdp2", "fsdp", (1e-2, np.inf)),
        ("megatron", "megatron,foreroute.trainers.verl.sampling_masks", (0, 1e-9)),
    ],
)
def test_each_sampled_token_is_scored_on_the_set_that_vllm_drew_it_from(tmp_path, monkeypatch, engine, libraries, k3):
    """Masks come from vLLM's second model runner, on a CPU with `stand_ins`. Unread, they leave k3 where it was."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    every = tmp_path / "every_process"
    every.mkdir()
    imported = "from tests.engines.releases.stand_ins import pretend_a_backend\n\npretend_a_backend()\n"
    (every / "sitecustomize.py").write_text(imported)
    policy, folder = tmp_path / "policy", tmp_path / "run"
    demo_cluster.prepare(policy, engine)
    here = "megatron_on_cpu," if engine == "megatron" else ""
    overrides = [*CUT, f"{MODEL}.external_lib=[{here}foreroute.trainers.verl.{libraries}]"]
    if engine == "megatron":
        target = "tests.trainers.verl.float32_config.Float32Config"
        overrides += [f"{MEGATRON}.dtype=float32", f"{MEGATRON}._target_={target}"]
    settings = {"precision": "float32", "replay": "R3", "engine": engine}
    ended = run(folder, policy, overrides=overrides, paths=[every], **settings)
    assert ended == 0, demo_cluster.tail(folder)
    found = demo_cluster.metrics(folder)
    assert list(found) == [1, 2]
    for values in found.values():
        assert values["disagreement"] == 0
        assert k3[0] < values["k3"] < k3[1]
    assert "val-" in (folder / "metrics.jsonl").read_text()
    assert demo_cluster.differing_weights(folder, policy) == ([], 3 * demo_cluster.RANKS * num_tensors(policy))


def num_tensors(policy):
    from engine_weights import of_policy

    return len(of_policy(policy))
