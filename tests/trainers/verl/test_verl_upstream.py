"""The patch for verl itself, applied to the released verl: what its FSDP engine alone does or refuses.

What it has in common with ours is in test_verl_ranks.py, by whose runs it is judged. Nothing of foreroute.trainers is
imported in a process that has the patch.
"""

import importlib
import sys
from contextlib import contextmanager
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

if find_spec("verl") is None:  # which ranks import from the patched folder, and not before
    pytest.skip("there is no verl in this environment: run `make night PART=verl`", allow_module_level=True)

from tests.trainers.given_experts import differing, watched
from tests.trainers.verl.verl_batches import nested
from tests.trainers.verl.verl_book import PROMPT, RESPONSE, Book
from tests.trainers.verl.verl_ranks import run

LORA = {"lora_rank": 4, "target_modules": ["q_proj", "v_proj"]}
STEPS, MODES = 3, ("R3", "R2", "disabled")
ACTOR, FSDP, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.model"
SETTINGS = [
    f"{ACTOR}.strategy=fsdp2",
    f"{ACTOR}.optim.lr=1e-2",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=24",
    f"{ACTOR}.use_torch_compile=False",
    f"{FSDP}.use_torch_compile=False",
    f"{FSDP}.dtype=float32",
    f"{FSDP}.ulysses_sequence_parallel_size=2",
    f"+{FSDP}.mixed_precision.param_dtype=bf16",
]


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


@pytest.fixture(scope="module")
def worked(folder, patched):
    """Of each rank, by mode what verl's worker did in each step."""
    return run(2, "test_verl_upstream.work", folder, patched)


@pytest.mark.parametrize("mode", MODES)
def test_verls_worker_replays_in_bfloat16_on_ranks_of_ulysses(mode, worked, folder):
    """Several steps, each of an old-log-prob pass and an update of two mini-batches."""
    for step, (first, second) in enumerate(zip(*(rank[mode] for rank in worked), strict=True)):
        # of R2, what the old-log-prob pass chose and the worker gave back
        routes = first["recorded"] or Book(folder, seed=step).by_tokens()
        passes = [[joined(*pair) for pair in zip(first[name], second[name], strict=True)] for name in ("old", "update")]
        judged = [differing(forwards, routes) for forwards in passes]
        # in two layers, of the pass, of the update and of its recomputation
        assert [rows for rows, _ in judged] == [times * 2 * sum(map(len, routes.values())) for times in (1, 2)]
        assert [others == 0 for _, others in judged] == [mode != "disabled"] * 2
        if mode == "disabled":
            assert not any(name.startswith("router_replay") for name in first["metrics"])
        elif mode == "R3":
            assert min(first["metrics"]["router_replay/native_disagreement"]) > 0.05
        else:  # of the second mini-batch, whose weights are others
            assert max(first["metrics"]["router_replay/native_disagreement"]) > 0


def joined(first, second):
    """A forward of which two ranks each saw a half of the tokens."""
    whole = copy(first)
    whole.ids, whole.is_real = torch.cat([first.ids, second.ids], 1), np.concatenate([first.is_real, second.is_real])
    pairs = zip(first.calls, second.calls, strict=True)
    whole.calls = [(layer, np.concatenate([ids, more])) for (layer, ids), (_, more) in pairs]
    return whole


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


@contextmanager
def verl_of(patched):
    """This process imports verl from there, and nothing of foreroute.trainers."""
    sys.path.insert(0, str(patched))
    importlib.import_module("examples.verl.verl_on_cpu")  # before verl
    import verl

    assert Path(verl.__file__).is_relative_to(patched)
    yield
    assert not [name for name in sys.modules if name.startswith("foreroute.trainers")]


def train(folder, runs, patched):
    """Those of test_verl_ranks.py, by verl's own engine."""
    with verl_of(patched):
        from tests.trainers.verl import test_verl_ranks

        return test_verl_ranks.train(folder, runs, kind="verl")


def work(folder, patched):
    """By verl's own worker, with its configuration."""
    with verl_of(patched):
        from tests.trainers.verl.verl_standins import PACKED, on_cpu

        results, settings = {}, [*SETTINGS, f"+{MODEL}.override_config.attn_implementation={PACKED}"]
        for mode in MODES:
            with on_cpu():
                worker = make_worker(folder, mode, *settings)
                results[mode] = [take_step(worker, Book(folder, seed=seed), mode) for seed in range(STEPS)]
        return results


def make_worker(folder, mode, *settings):
    from hydra import compose, initialize_config_module
    from verl.workers.engine_workers import ActorRolloutRefWorker

    lines = [*settings, f"{MODEL}.path={folder}", f"{FSDP}.router_replay.mode={mode}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=lines)
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def take_step(worker, book, mode):
    """What ran, and what came back, in an old-log-prob pass and an update."""
    from verl.utils import tensordict_utils as tu

    from tests.trainers.verl.verl_engines import tensordict

    batch, recorded = book.batch(routes=mode == "R3"), None
    signs = torch.tensor([1.0, -1.0]).repeat(len(batch["input_ids"]) // 2)[:, None]
    batch |= {"old_log_probs": batch["rollout_log_probs"], "advantages": signs * batch["response_mask"]}
    said = {"calculate_entropy": False, "max_token_len_per_gpu": 24}
    with watched(worker.actor.engine.module) as old:
        output = worker.compute_log_prob(tensordict(batch, compute_loss=False, **said))
    mini = {"global_batch_size": 3, "mini_batch_size": 3, "epochs": 1, "seed": 42}
    td = tensordict(batch, compute_loss=True, dataloader_kwargs={"shuffle": False}, **mini, **said)
    if mode == "R2":  # the trainer has it of the first rank of each group that shares sequences
        shared = [None if output is None else output["routed_experts"]]
        dist.broadcast_object_list(shared, src=0)
        [td["routed_experts"]] = shared
        recorded = book.by_tokens([rows.numpy() for rows in shared[0].unbind()])
    with watched(worker.actor.engine.module) as update:
        updated = worker.update_actor(td)
    metrics = None if updated is None else tu.get(updated, "metrics")
    return {"old": old, "update": update, "recorded": recorded, "metrics": metrics}


def refuse_and_compare(folder, patched):
    with verl_of(patched):
        return _refuse_and_compare(folder)


def _refuse_and_compare(folder):
    from verl.workers.engine.fsdp.router_replay import FSDPRouterReplay

    from tests.trainers.verl.test_verl_ranks import SAID
    from tests.trainers.verl.verl_engines import make, old_log_probs, tensordict, update

    book = Book(folder)
    routes, batch = book.by_tokens(), book.batch()
    own = book.by_tokens([ids for ids, _ in book.native])
    results, engine = {}, make(folder, kind="verl")
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
