"""Two ranks of verl's FSDP engine in each of its settings: routes, log-probs, metrics and weights are those of all.

Of our engine, and of verl's own under the patch for it, in which nothing of foreroute.trainers runs.
"""

from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from examples.verl import verl_on_cpu  # noqa: F401  before verl, in other processes too
from foreroute.errors import RankError, ReplayError
from foreroute.mismatch import Sentinel
from tests.trainers.given_experts import follows, watched
from tests.trainers.verl.verl_book import Book
from tests.trainers.verl.verl_engines import full_weights, make, old_log_probs, on_cpu, tensordict, update
from tests.trainers.verl.verl_ranks import run_each

FSDP1, ULYSSES = {"strategy": "fsdp"}, {"ulysses_sequence_parallel_size": 2}
BUCKETS = {"pad_to_length": True, "pad_to_length_bucket": 16}
FUSED = {"model": {"use_fused_kernels": True}}
SETTINGS = {
    "FSDP2": {},
    "FSDP2, fused": FUSED,
    "FSDP2, padded to buckets": BUCKETS,
    "FSDP1, padded": FSDP1 | {"batch": {"use_remove_padding": False}},
    "FSDP1, original parameters, fused": FSDP1 | FUSED | {"use_orig_params": True},
    "Ulysses": ULYSSES,
    "Ulysses, padded to buckets": ULYSSES | BUCKETS,
    "Ulysses, FSDP1, fused": ULYSSES | FSDP1 | FUSED,
    "Ulysses, not replayed": ULYSSES | {"replay": "disabled"},
}
R2 = {"Ulysses, R2": (ULYSSES, {}), "FSDP2, padded, R2": ({}, {"use_remove_padding": False})}
SAID = {"enable_routing_replay": True}
"""What verl's workers say of a batch."""
OF_REPLAY = ("mismatch", "router_replay")
PLAIN = {"optimizer": "SGD", "weight_decay": 0, "clip_grad": 1e9}
COUNT = 8
"""Sequences, of which data-parallel ranks have half each, and ranks of Ulysses parts of all."""
CONTROL = "Ulysses, not replayed"
PATHS = [("foreroute", name) for name in SETTINGS]
PATHS += [("patch", name) for name in SETTINGS if name != "FSDP2, fused"]  # whose output head nobody else gathers


@pytest.fixture(scope="module")
def found(folder, patched):
    """What ranks did, of our engine and of verl's own."""
    settings = {name: SETTINGS[name] for who, name in PATHS if who == "patch"}
    given = (patched, "test_verl_ranks.train", folder, settings, "verl")
    return {
        "foreroute": run_each(2, "test_verl_ranks.train", folder, SETTINGS),
        "patch": run_each(2, "verl_ranks.with_verl_of", *given),
    }


@pytest.fixture(scope="module")
def book(folder):
    return Book(folder, count=COUNT)


@pytest.fixture(scope="module")
def exact(book):
    return book.exact()


@pytest.mark.shows("verl, FSDP engine", "FSDP1 and FSDP2, packed and padded batches, on two ranks")
@pytest.mark.shows("verl, FSDP engine", "Ulysses sequence parallelism (flash attention is a stand-in)")
@pytest.mark.shows("verl, FSDP engine", "`use_fused_kernels` (verl's kernels of torch)")
@pytest.mark.shows("verl, FSDP engine", "activation checkpointing, `pad_to_length`")
@pytest.mark.parametrize(("who", "name"), PATHS)
def test_routes_log_probs_and_weights_after_a_step_are_those_of_one_process(who, name, found, book, exact):
    """Weights are held against float64. The control is off in all."""
    replayed, (log_probs, rounding) = name != CONTROL, exact
    wanted, before = book.descended(share=1 if "Ulysses" in name else 0.5)
    step = max(float((before[key] - wanted[key]).abs().max()) for key in wanted)
    for rank in found[who][name]:
        # in two layers, of the update with its recomputation and of an old pass behind it
        assert {*rank["calls"]} == {(4, replayed), (2, replayed)}
        pairs = zip(rank["sequences"], rank["log_probs"], strict=True)
        apart = [float((ours - log_probs[s]).abs().max()) for s, ours in pairs]
        assert (max(apart) < 8 * rounding) == replayed, (apart, rounding)
        assert rank["weights"].keys() == wanted.keys()
        apart = max(float((rank["weights"][key].double() - wanted[key]).abs().max()) for key in wanted)
        assert (apart < 1e-5 * step) == replayed, (apart, step)
        if who == "patch" and replayed:
            assert min(rank["metrics"]["router_replay/native_disagreement"]) > 0.05


@pytest.mark.parametrize("name", SETTINGS)
def test_metrics_are_of_all_sequences(name, found, book):
    metrics, others = (rank["metrics"] for rank in found["foreroute"][name])
    assert metrics == others
    log_r, replayed = book.log_ratios(), name != CONTROL
    assert (metrics["mismatch/k3"] == [pytest.approx(np.mean(np.exp(log_r) - 1 - log_r), rel=1e-3)]) == replayed
    assert (metrics["mismatch/disagreement"] == [0.0]) == replayed
    if replayed:
        native, wanted = metrics["mismatch/native_disagreement"], found["foreroute"]["FSDP2"][0]["metrics"]
        assert native == wanted["mismatch/native_disagreement"]
        assert native[0] > 0.05


@pytest.mark.parametrize(("who", "name"), PATHS)
def test_all_ranks_end_where_one_cannot_judge_or_has_no_routes(who, name, found):
    first, second = (rank["refused"] for rank in found[who][name])
    if name == CONTROL:
        assert first is second is None
    elif who == "foreroute":
        assert "another rank" in first
        assert second == "no rows here"
    else:
        assert "missing 'routed_experts'" in first


@pytest.mark.shows("verl, FSDP engine", "R2")
@pytest.mark.parametrize(("who", "metric"), [("foreroute", "mismatch"), ("patch", "router_replay")])
@pytest.mark.parametrize("name", R2)
def test_r2_records_whole_sequences_of_ranks_that_share_them(who, name, metric, found, book):
    for rank in found[who][name]:
        assert np.array_equal(rank["recorded"], np.concatenate([book.native[s][0] for s in rank["sequences"]]))
        assert rank["calls"]
        assert all(each for _, each in rank["calls"])
        # of the second update, whose weights are others
        assert max(rank["metrics"][f"{metric}/native_disagreement"]) > 0
        assert "mismatch/disagreement" not in rank["metrics"]


def train(folder, runs, whose=None):
    """What a rank did in each run, by our engine or, if `whose` is "verl", by verl's own."""
    rank, results = dist.get_rank(), {}
    for name, settings in runs.items():
        book = Book(folder, count=COUNT)
        mine = sequences_of(name, rank)
        batch = {name: values[mine] for name, values in book.batch().items()}
        settings = dict(settings)
        td = partial(tensordict, batch, use_fused_kernels="fused" in name, **SAID, **settings.pop("batch", {}))
        with on_cpu():
            engine = make(folder, whose=whose, optimizer=PLAIN, lr=1, **settings)
            old_log_probs(engine, td())  # the first is held against the model's own routes
            log_probs, _ = old_log_probs(engine, td())
            if whose is None:
                engine.routing.metrics.__init__()  # so that sums are of one pass
            old_log_probs(engine, td())
            with watched(engine.module) as forwards:
                output = update(engine, td())
                weights, refused = full_weights(engine.module), _refused(engine, td(), rank, whose)
            results[name] = {
                "sequences": range(COUNT)[mine],
                "log_probs": log_probs,
                "metrics": {key: value for key, value in output["metrics"].items() if key.startswith(OF_REPLAY)},
                "calls": [(len(each.calls), follows(each, book.by_tokens())) for each in forwards],
                "weights": weights,
                "refused": refused,
            }
    return results | {name: _recorded_and_replayed(name, folder, whose) for name in R2}


def sequences_of(name, rank):
    return slice(None) if "Ulysses" in name else slice(COUNT // 2 * rank, COUNT // 2 * (rank + 1))


def _refused(engine, batch, rank, whose):
    """What a rank says of a rollout that the sentinel of the second cannot judge, or verl's own engine of no routes."""
    if whose is not None:
        old_log_probs(engine, batch)
        del batch["routed_experts"]

    def judge(sentinel, counts):
        if rank:
            raise ReplayError("no rows here")
        return []

    with mock.patch.object(Sentinel, "judge", judge):
        try:
            old_log_probs(engine, batch)
        except (ReplayError, RankError, RuntimeError) as error:
            return str(error)


def _recorded_and_replayed(name, folder, whose):
    book, mine, (settings, of_batch) = Book(folder, count=COUNT), sequences_of(name, dist.get_rank()), R2[name]
    given = {key: values[mine] for key, values in book.batch(routes=False).items()}
    batch = tensordict(given, **SAID, **of_batch)
    with on_cpu():
        engine = make(folder, "R2", whose=whose, **settings)
        _, output = old_log_probs(engine, batch)
        batch["routed_experts"] = output["model_output"]["routed_experts"]
        update(engine, batch)  # moves the weights
        with watched(engine.module) as forwards:
            metrics = update(engine, batch)["metrics"]
    own = book.by_tokens([ids for ids, _ in book.native])
    # ours has a column of the dense layer, which stands first
    recorded = batch["routed_experts"].values()[:, -2:].numpy()
    calls = [(len(each.calls), follows(each, own)) for each in forwards]
    return {"sequences": range(COUNT)[mine], "recorded": recorded, "calls": calls, "metrics": metrics}
