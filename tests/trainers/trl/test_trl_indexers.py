"""Sparse attention under TRL: old and update passes attend to what the rollout did, by what indexers hand on."""

import pytest

from examples.trl.tiny import tokenizer
from foreroute.adapters import hf
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.trainers.trl import GRPOTrainer, rollout_with
from tests.attended import SIZES, attended, chosen, followed
from tests.trainers.trl.trl_runs import NO_AUXILIARY, trained


class Watched(GRPOTrainer):
    """Keeps what indexers handed on in each pass, with the rollout that it belongs to."""

    def _get_per_token_logps_and_entropies(self, model, *args, **options):
        with attended(self.accelerator.unwrap_model(model)) as seen:
            result = super()._get_per_token_logps_and_entropies(model, *args, **options)
        if self.routing.rollout is not None:  # the check of the first rollout comes before it is taken
            vars(self).setdefault("passes", []).append((self.routing.rollout.trace, seen))
        return result


def sparse_policy():
    return hf.build_model("deepseek_v32", seed=0, **{**SIZES, "vocab_size": len(tokenizer())})


@pytest.mark.slow
@pytest.mark.shows("TRL", "indexers of sparse attention")
@pytest.mark.parametrize(
    ("source", "replay"), [("generate", "R3"), ("generate", "R2"), ("our engine", "R3"), ("our engine", "none")]
)
def test_every_pass_attends_to_what_the_rollout_did(source, replay, folder):
    model = sparse_policy()
    rollout = None if source == "generate" else rollout_with(EmbeddedEngine(model, "bfloat16", indexers=True))
    settings = {"rollout_func": rollout, "replay": replay, "max_steps": 2, **NO_AUXILIARY}
    trainer = trained(folder, cls=Watched, model=model, **settings)
    # old log-probs of 8 sequences, of which R2 makes the rollout, then an update for each micro-batch
    assert len(trainer.passes) == (4 if replay == "R2" else 5)
    for trace, seen in trainer.passes:
        others, rows = followed(seen, chosen(trace))
        assert rows > 50
        assert (others == 0) == (replay != "none")  # the control


@pytest.mark.slow
def test_a_rollout_without_choices_is_warned_of(folder):
    model = sparse_policy()
    rollout = rollout_with(EmbeddedEngine(model, "bfloat16"))
    with pytest.warns(UserWarning, match="indexers=True"):
        trained(folder, model=model, rollout_func=rollout, max_steps=1, **NO_AUXILIARY)
