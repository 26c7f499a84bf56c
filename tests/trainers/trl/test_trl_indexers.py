"""Sparse attention under TRL: old and update passes attend to what the rollout did.

The oracle is what indexers hand on.
"""

import pytest

from examples.trl.tiny import tokenizer
from foreroute.adapters import hf
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.trainers.trl import GRPOTrainer, rollout_with
from tests.attended import SIZES, attended, chosen, followed
from tests.trainers.trl.trl_runs import NO_AUXILIARY, make, trained


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


@pytest.mark.slow
@pytest.mark.shows("TRL", "indexers of sparse attention")
@pytest.mark.parametrize(
    ("source", "replay"),
    [("generate", "R3"), ("generate", "R2"), ("our engine", "R3"), ("our engine", "none")],
)
def test_every_pass_attends_to_what_the_rollout_did(source, replay, folder):
    model = sparse_policy()
    settings = {"rollout_func": SOURCES[source] and SOURCES[source](model), "replay": replay, **NO_AUXILIARY}
    trainer = trained(folder, kind=Watched, model=model, max_steps=2, **settings)
    # old log-probs of 8 sequences, of which R2 makes the rollout, then an update for each micro-batch
    assert len(trainer.passes) == (4 if replay == "R2" else 5)
    for trace, seen in trainer.passes:
        others, rows = followed(seen, chosen(trace))
        assert rows > 50
        assert (others == 0) == (replay != "none")  # the control


@pytest.mark.slow
def test_a_rollout_without_choices_is_warned_of(folder):
    model = sparse_policy()
    trainer = make(
        folder, model=model, rollout_func=rollout_with(EmbeddedEngine(model, "bfloat16")), max_steps=1, **NO_AUXILIARY
    )
    with pytest.warns(UserWarning, match="indexers=True"):
        trainer.train()
