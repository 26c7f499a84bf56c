"""The patch for verl itself, applied to the released verl: what its FSDP engine alone does or refuses.

What it has in common with ours is in test_verl_ranks.py, by whose runs it is judged.
"""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

if find_spec("verl") is None:  # which ranks import from the patched folder, and not before
    pytest.skip("there is no verl in this environment: run `make night PART=verl`", allow_module_level=True)

from tests.trainers.given_experts import differing, watched
from tests.trainers.verl.verl_batches import nested
from tests.trainers.verl.verl_book import PROMPT, RESPONSE, Book
from tests.trainers.verl.verl_ranks import run

LORA = {"lora_rank": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def found(folder, patched):
    return run(1, "test_verl_upstream.refuse_and_compare", folder, patched)[0]


def test_routes_a_token_off_are_seen(found):
    rows, others = found["a token off"]
    assert others > 0.5 * rows > 0
    assert min(found["metrics"]["router_replay/native_disagreement"]) > 0.5


def test_a_policy_with_adapters_is_replayed_and_without_them_routes_itself(found):
    for name in ("LoRA", "reference"):
        rows, others = found[name]
        assert others == 0 < rows
    assert found["reference on the rollout's"][1] > 0  # the control


def test_a_worker_says_of_its_batches_whether_they_are_replayed(found):
    assert found["workers"] == {"R3": True, "R2": True, "disabled": False}


def test_what_would_not_be_replayed_is_refused(found):
    said = found["refused"]
    assert "missing 'routed_experts'" in said["no routes"]
    assert "rows of zeros before the last trained token" in said["zeros"]
    for name in ("a gap", "zeros at the end"):
        assert "rows of zeros before the last trained token" in said[name]
        assert said[f"{name}, without padding"] == said[name]
    # nothing depends on what a tool said last
    assert said["a tool's answer"] == said["a tool's answer, without padding"] == "nothing"
    assert "routed_experts has 5 layers" in said["layers"]
    assert "rows with an id out of range" in said["out of range"]
    assert "does not say `enable_routing_replay`" in said["another trainer"]
    assert "enable_rollout_routing_replay=False" in said["R2 with a rollout's"]
    for name, words in REFUSED_SETTINGS.items():
        assert words[1] in said[name]


REFUSED_SETTINGS = {
    "turbo": ({"strategy": "fsdp_turbo"}, "strategy=fsdp_turbo"),
    "reference": ({"forward_only": True}, "reference policy or a critic"),
    "critic": ({"model_type": "value_model"}, "reference policy or a critic"),
    "offload": ({"offload_policy": True}, "param_offload"),
    "file": ({"record_file": "routes.pt"}, "are not read"),
}


def patch_verl(patched):
    """Have this process import verl from there."""
    sys.path.insert(0, str(patched))
    importlib.import_module("examples.verl.verl_on_cpu")  # before verl
    import verl

    assert Path(verl.__file__).is_relative_to(patched)


def train(folder, runs, patched):
    """Those of test_verl_ranks.py, by verl's own engine."""
    patch_verl(patched)
    from tests.trainers.verl import test_verl_ranks

    return test_verl_ranks.train(folder, runs, kind="verl")


def refuse_and_compare(folder, patched):
    patch_verl(patched)
    from verl.workers.engine.fsdp.router_replay import FSDPRouterReplay

    from tests.trainers.verl.test_verl_ranks import SAID
    from tests.trainers.verl.verl_engines import make, old_log_probs, tensordict, update

    book = Book(folder)
    routes, batch = book.by_tokens(), book.batch()
    own = book.by_tokens([ids for ids, _ in book.native])
    results = {"workers": {mode: worker_says(mode) for mode in ("R3", "R2", "disabled")}}
    engine = make(folder, kind="verl")
    laid_out = FSDPRouterReplay._to_model_inputs
    off = mock.patch.object(FSDPRouterReplay, "_to_model_inputs", lambda *args: laid_out(*args).roll(1, 1))
    with off, watched(engine.module) as forwards:
        results["metrics"] = update(engine, tensordict(batch, **SAID))["metrics"]
    results["a token off"] = differing(forwards, routes)

    def ask(values, change=lambda td: td, engine=engine, said=SAID):
        return refusal(old_log_probs, engine, change(tensordict(values, **said)))

    said = {name: ask(values) for name, values in spoilt(batch).items()}
    for name in ("a gap", "zeros at the end", "a tool's answer"):
        said[f"{name}, without padding"] = ask(spoilt(batch)[name], without_padding)
    said["another trainer"] = ask(batch, said={})
    said["R2 with a rollout's"] = ask(batch, engine=make(folder, "R2", kind="verl"))
    said |= {name: refusal(FSDPRouterReplay, configured(**each)) for name, (each, _) in REFUSED_SETTINGS.items()}
    engine = make(folder, kind="verl", model=LORA)
    with watched(engine.module) as forwards:
        old_log_probs(engine, tensordict(batch, **SAID))
    with watched(engine.module) as of_reference, engine.disable_adapter():
        old_log_probs(engine, tensordict(batch, **SAID))
    results |= {"LoRA": differing(forwards, routes), "reference": differing(of_reference, own)}
    return results | {"reference on the rollout's": differing(of_reference, routes), "refused": said}


def worker_says(mode):
    """Of its batches, by verl's own configuration."""
    from hydra import compose, initialize_config_module
    from verl.workers.engine_workers import ActorRolloutRefWorker

    lines = ["actor_rollout_ref.actor.strategy=fsdp2", f"actor_rollout_ref.actor.fsdp_config.router_replay.mode={mode}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=lines)
    return ActorRolloutRefWorker(config.actor_rollout_ref, role="actor").enable_routing_replay


def spoilt(batch):
    """Batches that lack something."""
    routes, mask = batch["routed_experts"], batch["response_mask"]
    gap, far = routes.clone(), routes.clone()
    gap[:, PROMPT - 1] = 0  # the last token of each prompt
    far[:, PROMPT - 1, 1] = torch.tensor([0, 8])
    lengths = mask.sum(1, keepdim=True)
    at_the_end = torch.arange(PROMPT + RESPONSE) >= PROMPT + lengths - 2
    short = routes.masked_fill(at_the_end[..., None, None], 0)
    trained = mask * (mask.cumsum(1) < lengths)
    return {
        "no routes": {name: values for name, values in batch.items() if name != "routed_experts"},
        "zeros": {**batch, "routed_experts": torch.zeros_like(routes)},
        "a gap": {**batch, "routed_experts": gap},
        "zeros at the end": {**batch, "routed_experts": short},
        "a tool's answer": {**batch, "routed_experts": short, "response_mask": trained, "loss_mask": trained},
        "layers": {**batch, "routed_experts": torch.cat([routes, routes[:, :, :2]], 2)},
        "out of range": {**batch, "routed_experts": far},
    }


def without_padding(td):
    """With prompts and responses nested as well, as verl's trainer on TransferQueue has them."""
    real = td["attention_mask"].bool()
    for name, kept in (("prompts", real[:, :PROMPT]), ("loss_mask", real[:, PROMPT:])):
        td[name] = nested([row[keep].numpy() for row, keep in zip(td[name], kept, strict=True)])
    return td


def configured(*, record_file=None, model_type="language_model", **changes):
    """What the patch looks at of an engine."""
    replay = SimpleNamespace(mode="R3", record_file=record_file, replay_file=None)
    config = {"strategy": "fsdp2", "forward_only": False, "offload_policy": False, "router_replay": replay, **changes}
    return SimpleNamespace(engine_config=SimpleNamespace(**config), model_config=SimpleNamespace(model_type=model_type))


def refusal(run, *args):
    try:
        run(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"
