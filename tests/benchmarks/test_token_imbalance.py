"""Workloads W0 to W7, their traces and their oracle: against published figures, other hands, and what is broken."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.harness import token_imbalance
from benchmarks.harness.token_imbalance import (
    WORKLOADS,
    Setting,
    checksum,
    counted,
    failed_checks,
    read_trace,
    recorded_cell,
    routes,
    sources,
    step_counts,
    write_trace,
)
from foreroute.errors import ConfigError, TraceContentError, TraceFileError
from foreroute.layout import pack_sequences
from foreroute.plan import PlanOptions, Topology, packed_counts, save_counts, verify
from foreroute.planner import plan
from foreroute.simulate import parse_config, simulate
from foreroute.testing.routes import synthetic_trace
from tests.plan.random_plans import LINKS
from tests.simulate.simulate_cases import small_values
from tests.traces import spec_of

SEED = 1234
SMALL, LARGE = Setting(8, 2, 128, 4), Setting(8, 4, 512, 4)
PUBLISHED = {  # largest load of an expert over the mean, and coefficient of variation: 128 tokens top-2, 512 top-4
    "W0_balanced": (1.000, 0.000, 1.000, 0.000),
    "W1_hot_expert_set": (3.312, 1.309, 1.781, 0.744),
    "W2_hot_rank": (3.219, 1.272, 1.770, 0.747),
    "W4_source_ragged": (1.281, 0.141, 1.086, 0.046),
    "W5_zero_expert_rank": (2.156, 1.007, 2.000, 1.000),
    "W6_rotating_hotspot": (3.312, 1.319, 1.770, 0.742),
    "W7_burst": (1.219, 0.126, 1.066, 0.040),
}


def steps(name, setting, count=12):
    return step_counts(name, setting, range(count), SEED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_loads_of_experts_are_those_that_are_published(name):
    for setting, expected in ((SMALL, PUBLISHED[name][:2]), (LARGE, PUBLISHED[name][2:])):
        loads_E = steps(name, setting, 1).sum(axis=(0, 1, 2))
        found = loads_E.max() / loads_E.mean(), loads_E.std() / loads_E.mean()
        assert [f"{value:.3f}" for value in found] == [f"{value:.3f}" for value in expected]


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_token_picks_experts_that_differ_and_gates_add_up(name):
    for setting in (SMALL, LARGE):
        ids_TK, gates_TK = routes(name, *(setting.num_experts, setting.top_k, setting.tokens), 3, SEED)
        assert (np.diff(np.sort(ids_TK), axis=1) > 0).all()
        assert 0 <= ids_TK.min() <= ids_TK.max() < 8
        assert gates_TK.dtype == np.float32
        assert np.allclose(gates_TK.sum(axis=1), 1, atol=1e-6)
    others = [steps(name, SMALL, 1), step_counts(name, SMALL, range(1), SEED + 1)]
    assert np.array_equal(*others) == (name == "W0_balanced")


def test_each_workload_is_uneven_in_its_own_way():
    loads = {name: steps(name, SMALL).sum(axis=(1, 2)) for name in WORKLOADS}  # by step and expert
    assert (loads["W0_balanced"] == 128).all()
    for name in ("W1_hot_expert_set", "W2_hot_rank"):
        assert (loads[name][:, :2].min(axis=1) > 3 * loads[name][:, 2:].max(axis=1)).all()
    assert (
        loads["W3_spread_hot_experts"][:, ::2].min(axis=1) > loads["W3_spread_hot_experts"][:, 1::2].max(axis=1)
    ).all()
    assert (loads["W5_zero_expert_rank"][:, :4] == 0).all()
    assert (loads["W5_zero_expert_rank"][:, 4:] > 0).all()
    hottest = loads["W6_rotating_hotspot"].argmax(axis=1) // 2
    assert hottest.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    burst = loads["W7_burst"].max(axis=1) / 128
    assert (burst[3::4] > 2).all()
    assert (np.delete(burst, [3, 7, 11]) < 1.5).all()


def test_ragged_sources_are_uneven_and_the_experts_are_not():
    counts = steps("W4_source_ragged", SMALL)
    assert (counts.sum(axis=3) == 2 * np.array([51, 102, 154, 205])).all()
    assert (np.bincount(sources("W1_hot_expert_set", 128, 4)) == 128).all()
    assert counts.sum(axis=2).max() < 1.5 * 128


def test_what_is_no_workload_is_refused():
    with pytest.raises(ConfigError, match="no workload is called W8; known are W0_balanced"):
        routes("W8", 8, 2, 4, 0, 0)
    with pytest.raises(ConfigError, match="W5_zero_expert_rank picks 5 of 4 experts"):
        routes("W5_zero_expert_rank", 8, 5, 4, 0, 0)


def test_a_checksum_is_of_every_step_and_size():
    name = "W6_rotating_hotspot"
    by_hand = hashlib.sha256(f"{name}|8|2|128|2|{SEED}|4".encode())
    for step in range(2):
        ids_TK, gates_TK = routes(name, 8, 2, 128, step, SEED)
        by_hand.update(ids_TK.astype("<i8").tobytes() + gates_TK.astype("<f4").tobytes())
    assert checksum(name, SMALL, 2, SEED) == by_hand.hexdigest()[:16]
    assert len({checksum(name, s, n, SEED) for s in (SMALL, LARGE) for n in (1, 2)}) == 4


def by_other_hands(folder, change=lambda manifest, tensors: None, after=lambda folder: None):
    """A trace written from its description alone."""
    ids_TK, gates_TK = map(torch.from_numpy, routes("W1_hot_expert_set", 8, 2, 16, 0, SEED))
    tensors = {"token_ids": ids_TK, "gates": gates_TK, "source_rank": torch.arange(16).int() % 4, "expert_ids": ids_TK}
    manifest = {"schema_version": 1, "producer_commit": "none", "seed": SEED, "logical_layer_id": 0, "step_id": 0}
    manifest |= {"microbatch_id": 0, "logical_num_tokens": 16, "num_experts": 8, "topk": 2, "hidden_size": 512}
    manifest |= {"world_size": 4, "original_partition": "rank-major", "workload_id": "W1_hot_expert_set"}
    manifest |= {"workload_checksum": "deadbeef", "extra": {}}
    change(manifest, tensors)
    (folder / "tensors").mkdir(parents=True)
    manifest["tensors"] = {}
    for name, tensor in tensors.items():
        path = folder / "tensors" / f"{name}.pt"
        torch.save(tensor, path)
        manifest["tensors"][name] = {
            "file": f"tensors/{name}.pt",
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).replace("torch.", ""),
        }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    after(folder)
    return tensors


def test_a_trace_of_other_hands_is_read(tmp_path):
    tensors = by_other_hands(tmp_path / "trace")
    manifest, ids_TK, gates_TK, source_T = read_trace(tmp_path / "trace")
    assert (manifest["workload_id"], manifest["hidden_size"]) == ("W1_hot_expert_set", 512)
    for found, name in ((ids_TK, "expert_ids"), (gates_TK, "gates"), (source_T, "source_rank")):
        assert np.array_equal(found, tensors[name].numpy())


def test_what_is_written_is_what_is_described_and_is_read_again(tmp_path):
    name, folder = "W4_source_ragged", tmp_path / "trace"
    ids_TK, gates_TK = routes(name, 8, 2, 128, 0, SEED)
    told = {"seed": SEED, "workload_checksum": checksum(name, SMALL, 1, SEED), "workload_id": name}
    everyone = np.tile(ids_TK, (4, 1)), np.tile(gates_TK, (4, 1)), sources(name, 128, 4)
    write_trace(folder, *everyone, num_experts=8, world_size=4, **told)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["schema_version"] == 1
    assert {key: manifest[key] for key in told} == told
    assert (manifest["logical_num_tokens"], manifest["topk"]) == (512, 2)
    for key, dtype, shape in (
        ("token_ids", "int64", [512, 2]),
        ("gates", "float32", [512, 2]),
        ("source_rank", "int32", [512]),
        ("expert_ids", "int64", [512, 2]),
    ):
        listed = manifest["tensors"][key]
        path = folder / listed["file"]
        assert (listed["dtype"], listed["shape"]) == (dtype, shape)
        assert listed["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert str(torch.load(path, weights_only=True).dtype) == f"torch.{dtype}"
    for again, array in zip(read_trace(folder)[1:], everyone, strict=True):
        assert np.array_equal(again, array)
    with pytest.raises(TraceFileError, match="is not empty"):
        write_trace(folder, *everyone, num_experts=8, world_size=4, **told)
    with pytest.raises(TraceContentError, match="experts beyond the 4"):
        write_trace(tmp_path / "other", *everyone, num_experts=4, world_size=4, **told)
    assert not (tmp_path / "other").exists()


def test_recorded_routes_become_a_trace_for_others(tmp_path):
    trace = synthetic_trace(spec_of(), [30, 20, 25, 40, 35], seed=0)
    packing = pack_sequences(trace.lengths, 4, 40)
    write_trace(
        tmp_path / "trace",
        *recorded_cell(trace, packing, 1, 2),
        num_experts=8,
        world_size=4,
        seed=0,
        workload_checksum="",
    )
    _, ids_TK, _, source_T = read_trace(tmp_path / "trace")
    assert np.array_equal(counted(ids_TK, source_T, SMALL), packed_counts(trace, packing)[1, 2])


def test_the_simulator_takes_a_workload(tmp_path):
    path = tmp_path / "counts.safetensors"
    save_counts(steps("W1_hot_expert_set", SMALL, 2), path)
    values = small_values(methods=("static", "ours_exact")) | {"workload": {"counts": str(path)}}
    found = simulate(parse_config(values, source="here"))
    loads_MG = steps("W1_hot_expert_set", SMALL, 2).sum(axis=(1, 2)).reshape(2, 4, 2).sum(axis=2)
    assert found["static"].imbalance == pytest.approx((loads_MG.max(axis=1) / 256).mean())
    assert found["ours_exact"].imbalance == 1


def put(name, place, value):
    def change(manifest, tensors):
        tensors[name] = tensors[name].clone()
        tensors[name][place] = value
        if name == "expert_ids":
            tensors["token_ids"] = tensors[name]

    return change


def say(**fields):
    return lambda manifest, tensors: manifest.update(fields)


def spoil(name):
    def after(folder):
        path = folder / "tensors" / f"{name}.pt"
        torch.save(torch.load(path, weights_only=True) / 2, path)

    return after


REFUSED = {
    "a gate that was changed": ({"after": spoil("gates")}, TraceFileError, r"gates\.pt has the SHA-256"),
    "a missing tensor": (
        {"after": lambda folder: (folder / "tensors" / "gates.pt").unlink()},
        TraceFileError,
        "lacks the tensor gates",
    ),
    "no manifest": ({"after": lambda folder: (folder / "manifest.json").unlink()}, TraceFileError, "cannot be read"),
    "a manifest that is none": (
        {"after": lambda folder: (folder / "manifest.json").write_text("[1]")},
        TraceFileError,
        "no manifest of schema_version 1",
    ),
    "another version": ({"change": say(schema_version=2)}, TraceFileError, "no manifest of schema_version 1"),
    "no seed": (
        {"change": lambda manifest, tensors: manifest.pop("seed")},
        TraceFileError,
        "lacks seed, or has another type there",
    ),
    "a number that is a word": ({"change": say(topk="2")}, TraceFileError, "lacks topk, or has"),
    "another dtype": (
        {"change": lambda manifest, tensors: tensors.update(source_rank=tensors["source_rank"].long())},
        TraceFileError,
        r"the format torch\.int32",
    ),
    "more picks than there are": ({"change": say(topk=3)}, TraceContentError, r"where the manifest says \[16, 3\]"),
    "more tokens than there are": ({"change": say(logical_num_tokens=17)}, TraceContentError, r"says \[17, 2\]"),
    "no tokens": (
        {
            "change": lambda manifest, tensors: (
                manifest.update(logical_num_tokens=0),
                tensors.update({name: tensor[:0] for name, tensor in tensors.items()}),
            )
        },
        TraceContentError,
        "no tokens",
    ),
    "token_ids of their own": ({"change": put("token_ids", (0, 0), 7)}, TraceContentError, "differ from expert_ids"),
    "an expert twice": ({"change": put("expert_ids", 0, 3)}, TraceContentError, "picks an expert twice"),
    "an expert that is none": ({"change": put("expert_ids", (0, 0), 8)}, TraceContentError, "experts beyond the 8"),
    "a gate that is no number": ({"change": put("gates", (0, 0), float("nan"))}, TraceContentError, "not finite"),
    "a negative gate": ({"change": put("gates", 0, torch.tensor([-0.5, 1.5]))}, TraceContentError, "negative"),
    "gates that are too much": ({"change": put("gates", (0, 0), 1.0)}, TraceContentError, "do not add up to 1"),
    "a rank that is none": ({"change": put("source_rank", 0, 4)}, TraceContentError, "source ranks beyond the 4"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_trace_that_cannot_be_true_is_refused_for_its_reason(what, tmp_path):
    broken, error, message = REFUSED[what]
    by_other_hands(tmp_path / "trace", **broken)
    with pytest.raises(error, match=message):
        read_trace(tmp_path / "trace")


@pytest.mark.parametrize("name", WORKLOADS)
def test_plans_with_two_slots_are_level_and_pass_the_oracle(name):
    for setting in (SMALL, replace(SMALL, num_ranks=2), LARGE):
        counts = steps(name, setting)
        options = PlanOptions(tolerance=0.0)
        found = plan(counts, Topology(setting.num_ranks, setting.num_ranks, 2, LINKS), options)
        verify(found, counts, options)
        assert (found.max_load_ML == setting.tokens * setting.top_k).all()
        assert (found.bound_ML == found.max_load_ML).all()
        ids_TK, _ = routes(name, setting.num_experts, setting.top_k, setting.tokens, 3, SEED)
        everyone = np.tile(ids_TK, (setting.num_ranks, 1)), sources(name, setting.tokens, setting.num_ranks)
        assert failed_checks(found.cell(3, 0), *everyone, setting) == []


def test_the_oracle_finds_rows_that_go_astray(monkeypatch):
    counts = steps("W1_hot_expert_set", SMALL)
    cell = plan(counts, Topology(4, 4, 2, LINKS), PlanOptions(tolerance=0.0)).cell(0, 0)
    ids_TK = np.tile(routes("W1_hot_expert_set", 8, 2, 128, 0, SEED)[0], (4, 1))
    source_T = sources("W1_hot_expert_set", 128, 4)
    for place, value, check in (((0, 0), ids_TK[0, 1], "distinct_topk_ok"), ((0, 1), 8, "id_range_ok")):
        broken = ids_TK.copy()
        broken[place] = value
        assert failed_checks(cell, broken, source_T, SMALL) == [check]
    schedule = token_imbalance.CellSchedule.of

    def astray(*arguments):
        right = schedule(*arguments)
        return replace(right, return_segments=right.return_segments[::-1])

    monkeypatch.setattr(token_imbalance.CellSchedule, "of", astray)
    assert failed_checks(cell, ids_TK, source_T, SMALL) == ["roundtrip_exact"]
