"""Sampling masks of a real vLLM under TRL's trainer: `stand_ins` has what a CPU lacks."""

import pytest

from examples.trl.tiny import policy
from foreroute.adapters import hf
from foreroute.trainers.trl import rollout_with
from tests.engines.vllm.test_sampling_masks import serving
from tests.trainers.trl.trl_runs import logged, make


@pytest.mark.exhaustive
def test_k3_is_that_of_rounding_on_the_sets_of_a_real_vllm(vllm_python, tmp_path):
    """Over two rollouts, the second with weights that TRL has changed. The control scores over all tokens."""
    k3 = {}
    with serving(hf.attach(policy()), vllm_python, tmp_path, "float32") as engine:
        for replay in ("R3", "none"):
            trainer = make(
                str(tmp_path / replay),
                rollout_func=rollout_with(engine),
                replay=replay,
                max_steps=8,
                learning_rate=1e-4,
                top_p=0.8,
            )
            trainer.train()
            k3[replay] = logged(trainer, "mismatch/k3")
    assert len(k3["R3"]) == len(k3["none"]) == 2
    assert max(k3["R3"]) < 1e-9
    assert min(k3["none"]) > 1e-2
