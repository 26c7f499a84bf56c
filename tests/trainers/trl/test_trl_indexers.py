"""Sparse attention under TRL: old and update passes attend to what the rollout did.

The oracle is what indexers hand on.
"""

import pytest

from examples.trl.tiny import tokenizer
from foreroute.adapters import hf
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import BatchMismatchError
from foreroute.trainers.trl import GRPOTrainer, rollout_with
from tests.adapters.hf.families import SPARSE, build
from tests.attended import SIZES, attended, chosen, followed
from tests.tiers import grid
from tests.trainers.trl.trl_runs import NO_AUXILIARY, logged, make, trained


class Watched(GRPOTrainer):
    """Keeps what indexers handed on in each pass, with the rollout that it belongs to."""

    def __init__(self, *args, **kwargs):
        self.passes = []
        super().__init__(*args, **kwargs)

    def watching(self, model):
        return attended(model)

    def _get_per_token_logps_and_entropies(self, model, *args, **options):
        with self.watching(self.accelerator.unwrap_model(model)) as seen:
            result = super()._get_per_token_logps_and_entropies(model, *args, **options)
        if self.routing.rollout is not None:  # the check of the first rollout comes before it is taken
            self.passes.append((self.routing.rollout.trace, seen))
        return result


def sparse_policy():
    return hf.build_model("deepseek_v32", seed=0, **{**SIZES, "vocab_size": len(tokenizer())})


SOURCES = {"generate": None, "our engine": lambda model: rollout_with(EmbeddedEngine(model, "bfloat16", indexers=True))}


@pytest.mark.shows("TRL", "indexers of sparse attention")
@pytest.mark.parametrize("source", ["generate", pytest.param("our engine", marks=pytest.mark.slow)])
def test_every_pass_attends_to_what_the_rollout_did(source, folder):
    model = sparse_policy()
    function = SOURCES[source] and SOURCES[source](model)
    trainer = trained(folder, kind=Watched, model=model, rollout_func=function, max_steps=2, **NO_AUXILIARY)
    assert len(trainer.passes) == 5  # old log-probs of 8 sequences, then an update for each micro-batch
    for trace, seen in trainer.passes:
        others, rows = followed(seen, chosen(trace))
        assert rows > 50
        assert others == 0


@pytest.mark.slow
def test_updates_of_r2_attend_to_what_the_old_pass_did(folder):
    trainer = trained(folder, kind=Watched, model=sparse_policy(), replay="R2", max_steps=2, **NO_AUXILIARY)
    for trace, seen in trainer.passes[-4:]:
        assert followed(seen, chosen(trace))[0] == 0
    assert logged(trainer, "mismatch/native_disagreement")


@pytest.mark.slow
def test_without_replay_passes_attend_to_others(folder):
    """The control, with the same rollouts."""
    model = sparse_policy()
    function = SOURCES["our engine"](model)
    trainer = trained(
        folder, kind=Watched, model=model, rollout_func=function, replay="none", max_steps=1, **NO_AUXILIARY
    )
    trace, seen = trainer.passes[0]
    assert followed(seen, chosen(trace))[0] > 0


@pytest.mark.slow
def test_a_rollout_without_choices_is_warned_of(folder):
    model = sparse_policy()
    trainer = make(
        folder, model=model, rollout_func=rollout_with(EmbeddedEngine(model, "bfloat16")), max_steps=1, **NO_AUXILIARY
    )
    with pytest.warns(UserWarning, match="indexers=True"):
        trainer.train()


UNITS_AT_SLOTS = ("deepseek_v4", "minimax_m3_vl")
"""Families that cut units by their place in the batch."""


class Recorded(Watched):
    """Keeps recordings of what was executed."""

    def watching(self, model):
        return self.routing.routed.record(indexers=True)


def sparse_by_units(family):
    """A policy of such a family, which attends to a part of what it sees."""
    return build(family, **SPARSE[family], vocab_size=len(tokenizer()), max_position_embeddings=256)


@grid(("family", "replay"), zip(UNITS_AT_SLOTS, ["R3", "R2"], strict=True), quick=1)
def test_units_that_padding_moves_are_refused(folder, family, replay):
    """TRL pads prompts of several lengths on the left."""
    trainer = make(folder, model=sparse_by_units(family), replay=replay, max_steps=1)
    with pytest.raises(BatchMismatchError, match=r"sequence.*padding"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("family", UNITS_AT_SLOTS)
def test_prompts_of_one_length_are_followed(folder, family):
    # TRL's auxiliary loss asks for a number of experts by a name that DeepSeek-V4 does not have
    settings = {"prompts": ["many vowels: "] * 8, "max_steps": 2, **NO_AUXILIARY}
    trainer = trained(folder, kind=Recorded, model=sparse_by_units(family), **settings)
    assert len(trainer.passes) == 5
    for trace, recording in trainer.passes:
        others, rows = followed(chosen(recording.trace()), chosen(trace))
        assert (others, rows > 50) == (0, True)
        assert trace.streams["indexer"].ids.size
