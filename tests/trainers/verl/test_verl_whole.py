"""verl whole, under Ray: its trainer on two ranks, its vLLM servers, its checkpoints. A run takes three minutes."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")
pytest.importorskip("ray", reason="there is no Ray in this environment: run `make night PART=verl`")

ROOT = Path(__file__).parents[3]
WITHIN_S = 1500
"""Five times what a run takes on two quiet cores."""
sys.path.append(str(ROOT / "examples" / "verl"))
import demo_cluster

MODEL = "actor_rollout_ref.model"
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


def run(folder, policy, **settings):
    """A run to its end, and its metrics by step."""
    process = demo_cluster.start(folder, policy, **settings)
    try:
        assert process.wait(WITHIN_S) == 0, demo_cluster.tail(folder)
    finally:
        process.terminate()  # and its Ray cluster, which goes with it
        process.wait(60)
    return demo_cluster.metrics(folder)


@pytest.mark.parametrize(("engine", "precision", "below"), [("fsdp2", "float32", 1e-9), ("megatron", "bfloat16", 2e-3)])
def test_a_run_replays_every_rollout_and_goes_on_from_its_checkpoint(tmp_path, engine, precision, below):
    policy, folder = tmp_path / "policy", tmp_path / "run"
    demo_cluster.prepare(policy, engine)
    for first, last in ((0, 2), (2, 3)):
        overrides = [f"trainer.total_training_steps={last}"]
        found = run(folder, policy, precision=precision, replay="R3", engine=engine, overrides=overrides)
        assert list(found) == [*range(first + 1, last + 1)]
        # a sync before each step and after the last, to every engine, of all the policy's tensors
        syncs = (last - first + 1) * demo_cluster.RANKS
        assert demo_cluster.differing_weights(folder, policy, first=first) == ([], syncs * num_tensors(policy))
        for values in found.values():
            assert values["disagreement"] == 0
            assert values["k3"] < below
            if engine == "megatron":
                assert values["rows_off"] == 0
                assert values["imbalance_executed"] == values["imbalance_planned"] < values["imbalance_static"]
        for file in (folder / "engines").iterdir():
            file.unlink()


@pytest.mark.parametrize(
    ("libraries", "k3"), [("fsdp,foreroute.trainers.verl.sampling_masks", (0, 1e-9)), ("fsdp", (1e-2, np.inf))]
)
def test_each_sampled_token_is_scored_on_the_set_that_vllm_drew_it_from(tmp_path, monkeypatch, libraries, k3):
    """Masks come from vLLM's second model runner, on a CPU with `stand_ins`. Unread, they leave k3 where it was."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    every = tmp_path / "every_process"
    every.mkdir()
    imported = "from tests.engines.releases.stand_ins import pretend_a_backend\n\npretend_a_backend()\n"
    (every / "sitecustomize.py").write_text(imported)
    policy, folder = tmp_path / "policy", tmp_path / "run"
    demo_cluster.prepare(policy, "fsdp2")
    overrides = [*CUT, f"{MODEL}.external_lib=[foreroute.trainers.verl.{libraries}]"]
    settings = {"precision": "float32", "replay": "R3", "engine": "fsdp2"}
    found = run(folder, policy, overrides=overrides, paths=[every], **settings)
    assert list(found) == [1, 2]
    for values in found.values():
        assert values["disagreement"] == 0
        assert k3[0] < values["k3"] < k3[1]
    assert "val-" in (folder / "metrics.jsonl").read_text()
    assert demo_cluster.differing_weights(folder, policy) == ([], 3 * demo_cluster.RANKS * num_tensors(policy))


def num_tensors(policy):
    from engine_weights import of_policy

    return len(of_policy(policy))
