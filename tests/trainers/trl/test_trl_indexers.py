"""Sparse attention under TRL: old and update passes attend to what the rollout did.

The oracle is what indexers hand on.
"""

import pytest

from examples.trl.tiny import tokenizer
from foreroute.adapters import hf
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import ConfigError
from foreroute.trainers.trl import GRPOTrainer, rollout_with
from tests.attended import SIZES, attended, chosen, followed
from tests.trainers.trl.trl_runs import logged, make


class Watched(GRPOTrainer):
    """Keeps what indexers handed on in each pass, with the rollout that it belongs to."""

    def __init__(self, *args, **kwargs):
        self.passes = []
        super().__init__(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model, *args, **options):
        with attended(self.accelerator.unwrap_model(model)) as seen:
            result = super()._get_per_token_logps_and_entropies(model, *args, **options)
        if self.routing.rollout is not None:  # the check of the first rollout comes before it is taken
            self.passes.append((self.routing.rollout.trace, seen))
        return result


def sparse_policy():
    return hf.build_model("deepseek_v32", seed=0, **{**SIZES, "vocab_size": len(tokenizer())})


SOURCES = {"generate": None, "our engine": lambda model: rollout_with(EmbeddedEngine(model, "bfloat16", indexers=True))}


@pytest.mark.parametrize("source", SOURCES)
def test_every_pass_attends_to_what_the_rollout_did(source, folder):
    model = sparse_policy()
    function = SOURCES[source] and SOURCES[source](model)
    trainer = make(folder, kind=Watched, model=model, rollout_func=function, max_steps=2)
    trainer.train()
    assert len(trainer.passes) == 5  # old log-probs of 8 sequences, then an update for each micro-batch
    for trace, seen in trainer.passes:
        others, rows = followed(seen, chosen(trace))
        assert rows > 50
        assert others == 0


def test_updates_of_r2_attend_to_what_the_old_pass_did(folder):
    trainer = make(folder, kind=Watched, model=sparse_policy(), replay="R2", max_steps=2)
    trainer.train()
    for trace, seen in trainer.passes[-4:]:
        assert followed(seen, chosen(trace))[0] == 0
    assert logged(trainer, "mismatch/native_disagreement")


def test_without_replay_passes_attend_to_others(folder):
    """The control, with the same rollouts."""
    model = sparse_policy()
    function = SOURCES["our engine"](model)
    trainer = make(folder, kind=Watched, model=model, rollout_func=function, replay="none", max_steps=1)
    trainer.train()
    trace, seen = trainer.passes[0]
    assert followed(seen, chosen(trace))[0] > 0


def test_gate_weights_which_nothing_would_force_are_refused(folder):
    model = sparse_policy()
    trainer = make(
        folder, model=model, rollout_func=rollout_with(EmbeddedEngine(model, gate_weights=True)), max_steps=1
    )
    with pytest.raises(ConfigError, match=r"the rollout has gate weights.*without_gate_weights\(\)"):
        trainer.train()
