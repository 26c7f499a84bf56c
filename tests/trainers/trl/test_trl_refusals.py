"""Replay that would be wrong, or would not happen, ends in one clear error."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl
from trl.generation.vllm_client import VLLMClient
from trl.trainer import utils

from examples.trl.tiny import policy
from foreroute.costs import hardware_preset
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import AttachError, BatchMismatchError, CaptureError, ConfigError, ReplayError, StaleTraceError
from foreroute.trainers.trl import GRPOTrainer, RoutingReplay, rollout_with
from foreroute.trainers.trl.rollout import ROWS
from foreroute.trainers.trl.settings import require_supported
from tests.tiers import grid
from tests.trainers.trl.routes_book import Book
from tests.trainers.trl.trl_runs import make

TOPOLOGY = hardware_preset("h100").topology(num_ranks=2, redundant_slots=2)


@pytest.mark.shows("TRL", "`num_beams` above 1", refused="beams change their places after they were routed")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replay": "R4"}, "expected one of 'none', 'R2', 'R3'"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams is 2.* sample with num_beams=1"),
        ({"torch_compile_backend": "eager"}, "cannot recompute what was replayed; take 'inductor' or 'aot_eager'"),
        ({"replay": "none", "topology": TOPOLOGY}, "which are made of replayed routes; take replay='R3'"),
        (
            {"topology": "cluster.toml"},
            r"topology is 'cluster.toml'; expected a Topology, or what load_cluster\(\) gives",
        ),
    ],
    ids=["mode", "beams", "compiled", "plans without replay", "no topology"],
)
def test_settings_that_do_not_go_with_replay(settings, message, folder):
    with pytest.raises(ConfigError, match=message):
        make(folder, **settings)


def test_plans_of_experts_that_foreroute_does_not_spread(folder):
    with pytest.raises(AttachError, match='ep_implementation="foreroute'):
        make(folder, topology=TOPOLOGY)


def test_a_release_of_trl_without_a_hook_is_named(folder, monkeypatch):
    monkeypatch.delattr(trl.GRPOTrainer, "_compute_loss")
    with pytest.raises(AttachError, match=rf"trl {trl.__version__} has no GRPOTrainer\._compute_loss"):
        make(folder)


def test_r2_without_an_old_pass_has_nothing_to_replay(folder):
    with pytest.raises(ReplayError, match=r"nothing.*replay"):
        make(folder, replay="R2", num_iterations=1, steps_per_generation=2).train()


def test_a_trainer_that_is_not_trls(folder):
    class Alone(RoutingReplay):
        pass

    with pytest.raises(AttachError, match=r"derived.*trl\.GRPOTrainer"):
        Alone()


class OwnStep(GRPOTrainer):
    """A loss of its own, past everything."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return next(model.parameters()).sum() * 0


def bringing(change):

    class Changed(GRPOTrainer):
        def _prepare_inputs(self, generation_batch):
            inputs = dict(super()._prepare_inputs(generation_batch))
            change(inputs)
            return inputs

    return Changed


def nothing_else(inputs):
    del inputs[ROWS]


def of_another_sequence(inputs):
    """As carrying routes beside TRL's batch would."""
    inputs[ROWS] = torch.flip(inputs[ROWS], [0])


def of_the_rollout_before(inputs):
    inputs[ROWS] = inputs[ROWS] - torch.tensor([1, 0])


@grid(
    ("kind", "error", "message"),
    [
        (OwnStep, ReplayError, "a training step without"),
        (bringing(nothing_else), ReplayError, "foreroute_rows"),
        (bringing(of_another_sequence), BatchMismatchError, r"the sequences \[1, 0\] of the trace"),
        (bringing(of_the_rollout_before), ReplayError, r"rollouts \[0\]"),
    ],
    quick=2,
)
def test_a_step_in_which_nothing_was_replayed_or_routes_of_others(kind, error, message, folder):
    with pytest.raises(error, match=message):
        make(folder, kind=kind).train()


def test_routes_of_other_tokens_are_not_compared_either_and_end_no_run(folder, caplog):
    kind = bringing(of_another_sequence)
    trainer = make(folder, kind=kind, replay="none", num_iterations=1, steps_per_generation=2, max_steps=1)
    trainer.train()
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("foreroute")]
    assert "2 forwards ran on other tokens than the routes of the rollout" in said
    assert not any(name.startswith("mismatch/") for entry in trainer.state.log_history for name in entry)


@grid(
    ("change", "error", "message"),
    [
        (lambda routes: [*routes[1:], routes[0]], CaptureError, "rows for"),
        (lambda routes: routes[:-1], ReplayError, "7 'routed_experts' for 8"),
        (lambda routes: dict(enumerate(routes)), ReplayError, "a dict as 'routed_experts' for 8"),
        (lambda routes: [np.zeros_like(each) for each in routes], CaptureError, "sequence 0"),
    ],
    ids=["shuffled", "too-few", "dictionary", "all-zero"],
    quick=2,
)
def test_routes_of_a_rollout_func_that_are_wrong(change, error, message, folder):
    model = policy()
    trainer = make(folder, model=model, rollout_func=Book(model, change=change))
    with pytest.raises(error, match=message):
        trainer.train()


def test_a_rollout_func_that_returns_no_dictionary(folder):
    trainer = make(folder, rollout_func=lambda prompts, trainer: [prompts])
    with pytest.raises(ReplayError, match="the rollout_func returned a list; expected a dictionary"):
        trainer.train()


class Engine:
    """One that never takes over new weights."""

    weight_version = 0

    def __init__(self, model):
        self._engine = EmbeddedEngine(model)
        self._engine.weight_version = 7

    def load_weights(self, weights, version):
        pass

    def generate(self, *args):
        return self._engine.generate(*args)


def test_routes_of_other_weights_are_refused(folder):
    model = policy()
    trainer = make(folder, model=model, rollout_func=rollout_with(Engine(model)))
    with pytest.raises(StaleTraceError, match=r"versions \[7\].*rollout.*0"):
        trainer.train()


@grid(
    ("settings", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
        ({"generation_kwargs": {"seed": 1}}, "generation_kwargs"),
    ],
    quick=1,
)
def test_sampling_that_an_engine_does_not_know(settings, message, folder):
    model = policy()
    trainer = make(folder, model=model, replay="none", rollout_func=rollout_with(Engine(model)), **settings)
    with pytest.raises(ConfigError, match=message):
        trainer.train()


def sharded(version):
    return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version)))


@pytest.mark.shows("TRL", "FSDP1", refused="`accelerate` runs it on GPUs alone, where nobody tested it")
def test_what_was_never_tested_with_replay(folder, monkeypatch):
    trainer = make(folder)
    monkeypatch.setattr(trainer, "accelerator", sharded(2))
    require_supported(trainer, "R3")
    monkeypatch.setattr(trainer, "accelerator", sharded(1))
    with pytest.raises(ConfigError, match="fsdp_version: 2"):
        require_supported(trainer, "R3")


OLDER = {
    "paged": "use_transformers_paged generates over",
    "server": r"'server' is not replayed before TRL 1\.11",
    "liger": r"use_liger_kernel is not replayed before TRL 1\.15",
    "sets": r"top_k or min_p is not replayed before TRL 1\.15",
}


@pytest.mark.parametrize("reason", OLDER)
def test_what_older_releases_do_otherwise(reason, folder, monkeypatch):
    trainer = make(folder)
    if reason == "paged":
        monkeypatch.delattr(trainer, "use_transformers_continuous_batching", raising=False)
        trainer.use_transformers_paged = True
    elif reason == "server":
        trainer.use_vllm, trainer.vllm_mode = True, "server"
        monkeypatch.delattr(VLLMClient, "_post", raising=False)
    else:
        monkeypatch.delattr(utils, "add_fused_lm_head", raising=False)
        require_supported(trainer, "R3")
        trainer.top_p, trainer.args.use_liger_kernel = (0.8, False) if reason == "sets" else (1.0, True)
    with pytest.raises(ConfigError, match=OLDER[reason]):
        require_supported(trainer, "R3")
