"""Plans survive the disk; damaged files are refused or give the same plan."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreroute.errors import PlanError
from foreroute.plan.checker import verify
from foreroute.plan.plan_file import PLAN_FILE, load_plan, plan_content, plan_from_bytes, plan_to_bytes, save_plan
from tests.plan.random_plans import LINKS, changed, small_case
from tests.trace.forging import STAIRCASE


def equal(a, b):
    """Every field, dtypes included."""
    for name, one in a.tensors.items():
        other = b.tensors[name]
        assert (type(one), one.dtype, one.tolist()) == (type(other), other.dtype, other.tolist())
    sizes = [plan.packing and (plan.packing.num_micro_steps, plan.packing.num_ranks) for plan in (a, b)]
    names = ("topology", "counts_digest", "slots", "tokens_digest", "gains", "priced_paths", "unpriced")
    return sizes[0] == sizes[1] and all(getattr(a, name) == getattr(b, name) for name in names)


def test_round_trip(tmp_path):
    for seed in range(12):
        plan, counts = small_case(seed, slots=seed % 4, moves=2, micro_steps=seed % 3 + 1)
        again = load_plan(save_plan(plan, tmp_path / "deep" / f"{seed}.safetensors"))
        assert equal(again, plan)
        verify(again, counts)


@pytest.mark.parametrize(("most", "stored"), [(255, np.uint8), (65_535, np.uint16), (65_536, np.int32)])
def test_splits_keep_their_values_in_as_few_bytes_as_hold_them(most, stored, tmp_path):
    plan, _ = small_case(1)
    plan = changed(plan, "tokens_RG", (3, 1), most)
    assert plan_content(plan)[1]["tokens_RG"].dtype == stored
    assert equal(load_plan(save_plan(plan, tmp_path / "p")), plan)


def test_a_plan_that_contradicts_itself_is_not_written(tmp_path):
    plan, _ = small_case(1)
    with pytest.raises(PlanError, match="finite shares"):
        save_plan(replace(plan, gains={"recompute": 2.0, "update": 0.0}), tmp_path / "p")
    with pytest.raises(PlanError, match="there are 2 slots"):
        save_plan(changed(plan, "slot_R", 0, 2), tmp_path / "p")
    assert not list(tmp_path.iterdir())


def _forged(tmp_path, change):
    """A file of changed content with a right checksum."""
    metadata, tensors = plan_content(small_case(1)[0])
    change(metadata, tensors)
    return replace(PLAN_FILE, tensors=None).write(tmp_path / "forged", metadata, tensors, overwrite=False)


def _metadata(name, value):
    return lambda metadata, tensors: metadata.update({name: value})


def _tensor(name, value):
    return lambda metadata, tensors: tensors.update({name: value})


def _edit_topology(**values):
    def change(metadata, tensors):
        metadata["topology"] = json.dumps({**json.loads(metadata["topology"]), **values})

    return change


FORGERIES = {
    "deep json": (_metadata("topology", "[" * 100_000), "no readable plan file"),
    "a link of 400 digits": (_edit_topology(links=vars(LINKS) | {"node_latency_s": 10**400}), "node_latency_s is 1000"),
    "gains of one pass": (_metadata("gains", '{"update": 0.1}'), "gains are .*recompute and update"),
    "gains by no path": (_metadata("gains", '{"recompute": 0.1, "update": 0.1}'), "priced_paths is None"),
    "a gain too large to be one": (_metadata("gains", '{"recompute": -1e999, "update": 0.1}'), "gains are .*finite"),
    "no price without gains": (_metadata("unpriced", "planning"), "expected .* where no gains are"),
    "fetched twice": (_tensor("fetched_R", np.full(28, 2, np.uint8).view(np.bool_)), "neither 0 nor 1"),
    "wrapping staircase": (_tensor("offsets", np.array([*STAIRCASE, 28, 28, 28], np.int64)), "ascend from 0 to the 28"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_forgeries_with_a_right_checksum_are_refused(kind, tmp_path):
    change, message = FORGERIES[kind]
    with pytest.raises(PlanError, match=message):
        load_plan(_forged(tmp_path, change))


def test_no_memory_is_taken_for_ranks_that_no_expert_is_on(tmp_path):
    def change(metadata, tensors):
        tensors |= {name: tensor[:0] for name, tensor in tensors.items()}
        tensors |= {"offsets": np.zeros(1, np.int64), "tokens_RG": np.zeros((0, 30_000), np.int32)}
        tensors |= dict.fromkeys(("home_LE", "previous_home_LE"), np.zeros((3, 0), np.int16))
        tensors |= {"max_load_ML": np.zeros((0, 3), np.int64), "bound_ML": np.zeros((0, 3))}
        _edit_topology(num_ranks=30_000, ranks_per_node=1)(metadata, tensors)

    with pytest.raises(PlanError, match="3 layers with 0 experts on 30000 ranks"):
        load_plan(_forged(tmp_path, change))


VERSION_8 = Path(__file__).parent / "data" / "plan-v8.safetensors"


def test_version_8_is_read_and_written():
    plan = load_plan(VERSION_8)
    assert plan.hosts.home_LE.tolist() == [[0, 0, 1, 1], [1, 0, 0, 1]]
    assert plan.hosts.tokens_RG.tolist() == [[3, 0], [300, 1], [0, 0], [7, 60_000]]
    assert plan.bound_ML.tolist() == [[309.5, 20], [30, 70_010.25]]
    assert (plan.gains, plan.priced_paths) == ({"recompute": 0.25, "update": -0.0078125}, "direct")
    assert plan_to_bytes(plan) == VERSION_8.read_bytes()


def test_bytes_that_are_no_plan_are_refused():
    for content in (b"", b"\x10" + bytes(7) + b"[" * 16):
        with pytest.raises(PlanError, match=r"plan.*another"):
            plan_from_bytes(content)
    assert equal(plan_from_bytes(VERSION_8.read_bytes()), load_plan(VERSION_8))
