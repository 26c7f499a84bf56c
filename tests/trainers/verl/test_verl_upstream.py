"""The patch for verl itself, applied to the released verl: its FSDP engine replays in its own actor workers.

Two ranks run verl's `ActorRolloutRefWorker` with its configuration, and say what their experts were given in each
pass. It is judged here, against routes that are written down. Nothing of foreroute.trainers runs in them.
"""

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

if find_spec("verl") is None:
    pytest.skip("there is no verl in this environment: run `make night PART=verl`", allow_module_level=True)

from tests.trainers.verl.verl_batches import nested
from tests.trainers.verl.verl_book import PROMPT, RESPONSE, Book, watched

PATCH = Path(__file__).parents[3] / "examples" / "verl" / "upstream" / "fsdp_router_replay.patch"
RANKS, SEQUENCES, STEPS = 2, 8, 4
ACTOR, FSDP, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.model"
SETTINGS = [
    f"{ACTOR}.strategy=fsdp2",
    f"{ACTOR}.optim.lr=1e-2",
    f"{ACTOR}.ppo_mini_batch_size=4",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=24",
    f"{ACTOR}.use_torch_compile=False",
    f"{FSDP}.use_torch_compile=False",
    f"{FSDP}.dtype=float32",
    *(f"+{FSDP}.mixed_precision.{part}_dtype=fp32" for part in ("param", "reduce", "buffer")),
    f"+{MODEL}.override_config.attn_implementation=sdpa",
]
BUCKETS = [f"{FSDP}.pad_to_length=True", f"{FSDP}.pad_to_length_bucket=16"]
PARTS = f"{FSDP}.ulysses_sequence_parallel_size=2"
RUNS = {  # mode, steps, settings
    "R3": ("R3", STEPS, BUCKETS),
    "disabled": ("disabled", STEPS, []),
    "R2": ("R2", 1, BUCKETS),
    "R2 padded": ("R2", 1, [f"{MODEL}.use_remove_padding=False"]),
    "sequence parallel": ("R3", 1, [PARTS, f"{FSDP}.mixed_precision.param_dtype=bf16"]),
    "R2, sequence parallel": ("R2", 1, [PARTS]),
    "LoRA": ("R3", 1, [f"{MODEL}.lora_rank=4"]),
    "FSDP1, fused kernels": ("R3", 1, [f"{ACTOR}.strategy=fsdp", f"{MODEL}.use_fused_kernels=True"]),
}


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A folder with verl's package as it was released, and the patch applied."""
    folder = tmp_path_factory.mktemp("patched")
    released = Path(find_spec("verl").origin).parent
    shutil.copytree(released, folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["patch", "-p1", "--fuzz=0", "-i", PATCH], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def found(patched, folder, tmp_path_factory):
    shared = tmp_path_factory.mktemp("ranks")
    mp.spawn(_rank, (patched, folder, shared), nprocs=RANKS)
    return [torch.load(shared / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def books(folder):
    return books_of(folder)


def test_four_steps_on_the_routes_of_the_rollout_have_no_disagreement(found, books):
    for step, book in enumerate(books):
        rows, differing = 0, 0
        for results in found:
            old, update, metrics, _ = results["R3"][step]
            assert min(metrics["router_replay/native_disagreement"]) > 0.05
            rows, differing = np.add((rows, differing), judged(old + update, book, book.routes))
        # in two layers, of the old-log-prob pass, of the update, and of its recomputation
        assert (rows, differing) == (3 * 2 * sum(map(len, book.routes)), 0)


def test_the_log_probs_are_those_on_the_routes_in_float64(found, books):
    exact, rounding = books[0].exact()
    assert rounding < 1e-4
    for run in ("R3", "FSDP1, fused kernels"):
        given = [row for results in found for row in results[run][0][3]]
        assert max(float((a - b).abs().max()) for a, b in zip(given, exact, strict=True)) < 8 * rounding
    without = [row for results in found for row in results["disabled"][0][3]]
    assert max(float((a - b).abs().max()) for a, b in zip(without, exact, strict=True)) > 1000 * rounding


def test_without_replay_and_with_routes_a_token_off_there_is_disagreement(found, books):
    for step, book in enumerate(books):
        for results in found:
            old, update, metrics, _ = results["disabled"][step]
            rows, differing = judged(old + update, book, book.routes)
            assert differing > 0.1 * rows > 0
            assert "router_replay/native_disagreement" not in metrics
    for results in found:
        old, update, metrics, _ = results["a token off"]
        rows, differing = judged(old + update, books[0], books[0].routes)
        assert differing > 0.5 * rows > 0
        assert min(metrics["router_replay/native_disagreement"]) > 0.5


@pytest.mark.parametrize("run", ["LoRA", "FSDP1, fused kernels"])
def test_other_settings_follow_the_routes(run, found, books):
    for results in found:
        old, update, _, _ = results[run][0]
        rows, differing = judged(old + update, books[0], books[0].routes)
        assert differing == 0 < rows


def test_parts_of_sequences_are_given_their_part_of_the_routes(found, books):
    for run, routes in (("sequence parallel", books[0].routes), ("R2, sequence parallel", None)):
        passes = [merged(*(results[run][0][part] for results in found)) for part in (0, 1)]
        wanted = routes or recorded(passes[0], books[0])
        rows, differing = np.add(judged(passes[0], books[0], wanted), judged(passes[1], books[0], wanted))
        assert (rows, differing) == (3 * 2 * sum(map(len, wanted)), 0)


@pytest.mark.parametrize("run", ["R2", "R2 padded"])
def test_r2_updates_on_what_the_old_log_prob_pass_chose(run, found, books):
    for results in found:
        old, update, _, _ = results[run][0]
        wanted = recorded(old, books[0])
        assert judged(old, books[0], [ids for ids, _ in books[0].native])[1] == 0
        rows, differing = judged(update, books[0], wanted)
        assert differing == 0 < rows
    # the control: in the second mini-batch the weights have moved
    differing = [judged(r["disabled"][0][1], books[0], recorded(r["disabled"][0][0], books[0]))[1] for r in found]
    assert sum(differing) > 0


def test_a_reference_without_adapters_routes_itself(found, books):
    native = [ids for ids, _ in books[0].native]
    for results in found:
        assert judged(results["reference"], books[0], native)[1] == 0
        assert judged(results["reference"], books[0], books[0].routes)[1] > 0


def test_what_would_not_be_replayed_is_refused(found):
    for results in found:
        said = results["refused"]
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


def _rank(rank, patched, folder, shared):
    sys.path.insert(0, str(patched))
    from examples.verl import verl_on_cpu  # noqa: F401  before verl

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ["DIST_INIT_METHOD"] = f"file://{shared}/store"
    import verl
    from verl.workers.engine.fsdp.router_replay import FSDPRouterReplay

    assert Path(verl.__file__).is_relative_to(patched)
    torch.set_num_threads(1)
    books, results = books_of(folder), {}
    for name, (mode, num_steps, settings) in RUNS.items():
        parts = 1 if "sequence parallel" in name else RANKS  # of the batch: a part for each rank, or all for both
        own = slice(rank * SEQUENCES // RANKS, (rank + 1) * SEQUENCES // RANKS) if parts > 1 else slice(SEQUENCES)
        # FSDP1 sends weights from the first rank on GPUs only, says a check before; gloo can do it as well
        check = "torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states"
        with mock.patch(check) if "FSDP1" in name else nullcontext():
            actor = worker(folder, mode, settings)
        results[name] = [step(actor, batch_of(book, own), mode) for book in books[:num_steps]]
        batch = batch_of(books[0], own)
        if name == "R3":
            with mock.patch.object(FSDPRouterReplay, "_to_model_inputs", a_token_off(FSDPRouterReplay)):
                results["a token off"] = step(actor, batch, mode)
            results["refused"] = refusals(actor, batch)
        if name == "R2":
            results["refused"]["R2 with a rollout's"] = refusal(actor.compute_log_prob, tensordict(batch))
        if name == "LoRA":
            with watched(actor.actor.engine.module) as results["reference"]:
                actor.compute_log_prob(tensordict(batch, no_lora_adapter=True))
    torch.save(results, shared / f"{rank}.pt")


def a_token_off(replay):
    laid_out = replay._to_model_inputs
    return lambda *args: laid_out(*args).roll(1, 1)


def books_of(folder):
    return [Book(folder, count=SEQUENCES, seed=seed) for seed in range(STEPS)]


def worker(folder, mode, settings):
    from hydra import compose, initialize_config_module
    from verl.workers.engine_workers import ActorRolloutRefWorker

    lines = [*SETTINGS, *settings, f"{MODEL}.path={folder}", f"{FSDP}.router_replay.mode={mode}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=lines)
    actor = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    actor.init_model()
    return actor


def batch_of(book, own):
    """Sequences of a rollout as verl's trainer pads them, rewards given."""
    batch = {name: values[own] for name, values in book.batch().items()}
    signs = torch.tensor([1.0, -1.0]).repeat(len(batch["input_ids"]) // 2)[:, None]
    return {**batch, "old_log_probs": batch["rollout_log_probs"], "advantages": signs * batch["response_mask"]}


def tensordict(batch, **settings):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    td = left_right_2_no_padding(TensorDict(dict(batch), batch_size=len(batch["input_ids"])))
    tu.assign_non_tensor(td, temperature=1.0, **{"calculate_entropy": False, "compute_loss": False, **settings})
    return td


def without_padding(td):
    """With prompts and responses nested as well, as verl's trainer on TransferQueue has them."""
    real = td["attention_mask"].bool()
    for name, kept in (("prompts", real[:, :PROMPT]), ("loss_mask", real[:, PROMPT:])):
        td[name] = nested([row[keep].numpy() for row, keep in zip(td[name], kept, strict=True)])
    return td


def step(actor, batch, mode):
    """An old-log-prob pass and an update of two mini-batches: what ran in both, metrics, log-probs of sequences."""
    from verl.utils import tensordict_utils as tu

    if mode == "R2":
        batch = {name: values for name, values in batch.items() if name != "routed_experts"}
    with watched(actor.actor.engine.module) as old:
        output = actor.compute_log_prob(tensordict(batch))
    log_probs = [] if output is None else [row[:-1] for row in output["log_probs"].unbind()]
    td = tensordict(batch, compute_loss=True, global_batch_size=4, mini_batch_size=4, epochs=1, seed=42)
    tu.assign_non_tensor(td, dataloader_kwargs={"shuffle": False})
    if mode == "R2":  # the trainer has it of the first rank of each group that shares sequences
        shared = [None if output is None else output["routed_experts"]]
        if actor.actor.engine.use_ulysses_sp:
            torch.distributed.broadcast_object_list(shared, src=0)
        td["routed_experts"] = shared[0]
    with watched(actor.actor.engine.module) as update:
        updated = actor.update_actor(td)
    return old, update, None if updated is None else tu.get(updated, "metrics"), log_probs


def refusals(actor, batch):
    """What verl says to batches that lack something, and to settings."""
    from verl.workers.engine.fsdp.router_replay import FSDPRouterReplay

    routes = batch["routed_experts"]
    gap, far = routes.clone(), routes.clone()
    gap[:, PROMPT - 1] = 0  # the last token of each prompt
    far[:, PROMPT - 1, 1] = torch.tensor([0, 8])
    mask = batch["response_mask"]
    lengths = mask.sum(1, keepdim=True)
    at_the_end = torch.arange(PROMPT + RESPONSE) >= PROMPT + lengths - 2
    short = routes.masked_fill(at_the_end[..., None, None], 0)
    batches = {
        "no routes": {name: values for name, values in batch.items() if name != "routed_experts"},
        "zeros": {**batch, "routed_experts": torch.zeros_like(routes)},
        "a gap": {**batch, "routed_experts": gap},
        "zeros at the end": {**batch, "routed_experts": short},
        "a tool's answer": {**batch, "routed_experts": short, "response_mask": mask * (mask.cumsum(1) < lengths)},
        "layers": {**batch, "routed_experts": torch.cat([routes, routes[:, :, :2]], 2)},
        "out of range": {**batch, "routed_experts": far},
    }
    said = {name: refusal(actor.compute_log_prob, tensordict(values)) for name, values in batches.items()}
    for name in ("a gap", "zeros at the end", "a tool's answer"):
        said[f"{name}, without padding"] = refusal(actor.compute_log_prob, without_padding(tensordict(batches[name])))
    said["another trainer"] = refusal(actor.actor.infer_batch, tensordict(batch))
    for name, (changes, _) in REFUSED_SETTINGS.items():
        files = {"mode": "R3", "record_file": changes.get("record_file"), "replay_file": None}
        config = {"strategy": "fsdp2", "forward_only": False, "offload_policy": False, **changes}
        engine_config = SimpleNamespace(router_replay=SimpleNamespace(**files), **config)
        model_config = SimpleNamespace(model_type=changes.get("model_type", "language_model"))
        engine = SimpleNamespace(engine_config=engine_config, model_config=model_config)
        said[name] = refusal(FSDPRouterReplay, engine)
    return said


def refusal(run, *args):
    try:
        run(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def given_to_experts(forwards, book):
    """(sequence, layer, ids [T, K]) of every call of experts, for each sequence of the book in it."""
    for tokens, _, calls in forwards:
        flat = tokens.reshape(-1).numpy()
        for s, pair in enumerate(book.pairs):
            sequence = np.concatenate(pair)
            starts = range(len(flat) - len(sequence) + 1)
            for start in (at for at in starts if np.array_equal(flat[at : at + len(sequence)], sequence)):
                yield from ((s, layer, ids[start : start + len(sequence)]) for layer, ids in calls)


def judged(forwards, book, routes):
    """Rows that experts were given, of those with a route in [sequence][R, layers, K]; how many went to others."""
    rows = differing = 0
    for s, layer, ids in given_to_experts(forwards, book):
        wanted = np.sort(routes[s][:, layer])
        rows += len(wanted)
        differing += int((np.sort(ids[: len(wanted)]) != wanted).any(1).sum())
    return rows, differing


def recorded(forwards, book):
    """[sequence][T, layers, K] as experts were given them; none of a sequence that did not run."""
    routes = [np.zeros((sum(map(len, pair)), 2, 2), np.int64) for pair in book.pairs]
    for s, layer, ids in given_to_experts(forwards, book):
        routes[s][:, layer] = ids
    return routes


def merged(first, second):
    """Forwards of two ranks, of which each saw a half of the tokens."""
    return [
        (
            torch.cat([a[0], b[0]], 1),
            None,
            [(layer, np.concatenate([ids, more])) for (layer, ids), (_, more) in zip(a[2], b[2], strict=True)],
        )
        for a, b in zip(first, second, strict=True)
    ]
