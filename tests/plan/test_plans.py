"""Plans survive the disk, damaged files do not; of changed plans those pass that brute force takes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreroute.errors import ConfigError, CountsError, PlanError
from foreroute.layout import pack_sequences
from foreroute.plan import PlanOptions, Topology
from foreroute.plan.checker import verify
from foreroute.plan.plan_file import PLAN_FILE, load_plan, plan_content, plan_from_bytes, plan_to_bytes, save_plan
from tests.plan.random_plans import LINKS, changed, random_counts, random_plan, small_case, with_arrays
from tests.tiers import grid
from tests.trace.forging import STAIRCASE


def equal(a, b):
    """Every field, dtypes included."""
    for name, one in a.tensors.items():
        other = b.tensors[name]
        assert (type(one), one.dtype, one.tolist()) == (type(other), other.dtype, other.tolist())
    sizes = [plan.packing and (plan.packing.num_micro_steps, plan.packing.num_ranks) for plan in (a, b)]
    names = ("topology", "counts_digest", "slots", "tokens_digest", "gains", "priced_paths", "unpriced")
    return sizes[0] == sizes[1] and all(getattr(a, name) == getattr(b, name) for name in names)


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


def _topology(**values):
    return lambda metadata, _: metadata.update(topology=json.dumps(json.loads(metadata["topology"]) | values))


FORGERIES = {
    "deep json": (_metadata("topology", "[" * 100_000), r"no readable.*plan"),
    "a link of 400 digits": (_topology(links=vars(LINKS) | {"node_latency_s": 10**400}), "node_latency_s is 1000"),
    "gains of one pass": (_metadata("gains", '{"update": 0.1}'), r"gains are .*recompute and.*update"),
    "gains by no path": (_metadata("gains", '{"recompute": 0.1, "update": 0.1}'), "priced_paths is None"),
    "a gain too large to be one": (_metadata("gains", '{"recompute": -1e999, "update": 0.1}'), "gains are .*finite"),
    "no price without gains": (_metadata("unpriced", "planning"), r"expected .*no gains"),
    "fetched twice": (_tensor("fetched_R", np.full(28, 2, np.uint8).view(np.bool_)), "neither 0 nor 1"),
    "wrapping staircase": (_tensor("offsets", np.array([*STAIRCASE, 28, 28, 28], np.int64)), "ascend from 0 to the 28"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_with_a_right_checksum_are_refused(name, tmp_path):
    change, message = FORGERIES[name]
    with pytest.raises(PlanError, match=message):
        load_plan(_forged(tmp_path, change))


def test_no_memory_is_taken_for_ranks_that_no_expert_is_on(tmp_path):
    def change(metadata, tensors):
        tensors |= {name: tensor[:0] for name, tensor in tensors.items()}
        tensors |= {"offsets": np.zeros(1, np.int64), "tokens_RG": np.zeros((0, 30_000), np.int32)}
        tensors |= dict.fromkeys(("home_LE", "previous_home_LE"), np.zeros((3, 0), np.int16))
        tensors |= {"max_load_ML": np.zeros((0, 3), np.int64), "bound_ML": np.zeros((0, 3))}
        _topology(num_ranks=30_000, ranks_per_node=1)(metadata, tensors)

    with pytest.raises(PlanError, match="3 layers with 0 experts on 30000 ranks"):
        load_plan(_forged(tmp_path, change))


VERSION_8 = Path(__file__).parent / "data" / "plan-v8.safetensors"


def test_version_8_is_read_and_written_and_other_bytes_are_refused():
    plan = load_plan(VERSION_8)
    assert plan.hosts.home_LE.tolist() == [[0, 0, 1, 1], [1, 0, 0, 1]]
    assert plan.hosts.tokens_RG.tolist() == [[3, 0], [300, 1], [0, 0], [7, 60_000]]
    assert plan.bound_ML.tolist() == [[309.5, 20], [30, 70_010.25]]
    assert (plan.gains, plan.priced_paths) == ({"recompute": 0.25, "update": -0.0078125}, "direct")
    assert plan_to_bytes(plan) == VERSION_8.read_bytes()
    for content in (b"", b"\x10" + bytes(7) + b"[" * 16):
        with pytest.raises(PlanError, match=r"plan.*another"):
            plan_from_bytes(content)
    assert equal(plan_from_bytes(VERSION_8.read_bytes()), plan)


def test_valid_plans_pass_and_survive_the_disk(tmp_path):
    for seed in range(40):
        how = {"slots": seed % 4, "moves": seed % 3 * 2, "keep": seed % 2 * 0.7, "micro_steps": seed % 5 + 1}
        plan, counts = small_case(seed, **how)
        verify(plan, counts)
        again = load_plan(save_plan(plan, tmp_path / "deep" / f"{seed}.safetensors"))
        assert equal(again, plan)
        verify(again, counts.astype(np.int32))
    for shape in ((2, 1, 1, 4), (1, 1, 2, 2), (3, 2, 8, 8)):
        for counts in (random_counts(3, shape), np.zeros(shape, np.int64)):
            verify(random_plan(counts, Topology(shape[2], 1, 1, LINKS)), counts)


CORRUPTIONS = {
    "bound above": (lambda p: changed(p, "bound_ML", (2, 0), 1e9), r"micro-step 2, layer 0: .*1000000000\.0"),
    "bound is no number": (lambda p: changed(p, "bound_ML", (0, 0), np.nan), r"bound.*nan"),
    "previous homes uneven": (lambda p: changed(p, "previous_home_LE", (0, 3), 2), "previous_home_LE: in layer 0"),
    "other digest": (lambda p: replace(p, counts_digest="0" * 32), r"counts.*digest 000"),
    "dtype": (lambda p: with_arrays(p, tokens_RG=p.hosts.tokens_RG.astype(np.int64)), "tokens_RG is int64.*I32"),
    "other ranks": (lambda p: replace(p, topology=Topology(8, 2, 2, LINKS)), "tokens_RG is of 4 source ranks"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_what_is_wrong_is_named(name):
    corrupt, message = CORRUPTIONS[name]
    plan, counts = small_case(2, keep=0.6)
    verify(plan, counts)
    with pytest.raises((PlanError, CountsError), match=message):
        verify(corrupt(plan), counts)


def test_other_counts_are_refused():
    plan, counts = small_case(5)
    other = counts.copy()
    other[1, 1, 1, 1] += 1
    packed = replace(plan, packing=pack_sequences([3] * 12, 4, 3), tokens_digest="0" * 32)
    for given, wrong, words in ((plan, other, r"plan.*counts"), (packed, other, r"packing\.sequences")):
        with pytest.raises(CountsError, match=words):
            verify(given, wrong)


def test_options_bind():
    plan, counts = small_case(6, moves=4, keep=0.6)
    moved = int((plan.home_LE != plan.previous_home_LE).sum(axis=1).max())
    verify(plan, counts, PlanOptions(home_moves=moved))
    for options, words in (
        (PlanOptions(home_moves=moved - 1), rf"{moved} homes.*budget.*{moved - 1}"),
        (PlanOptions(home_moves=None, replicas=False), r"plan.*replicas"),
        (PlanOptions(home_moves=None, slots="shared"), r"layer.*shared"),
    ):
        with pytest.raises(PlanError, match=words):
            verify(plan, counts, options)


def test_a_plan_for_shared_slots_fetches_everything():
    plan, counts = small_case(6, keep=0.6)
    everything = with_arrays(plan, fetched_R=np.ones_like(plan.hosts.fetched_R))
    verify(replace(everything, slots="shared"), counts)
    with pytest.raises(PlanError, match=r"shared.*nothing"):
        verify(replace(plan, slots="shared"), counts)
    with pytest.raises(PlanError, match=r"holds.*already"):
        verify(everything, counts)


@grid("most", [30, 1], ids=["tokens", "no tokens"], quick=1)
def test_refuses_exactly_what_brute_force_refuses(most):
    """Where no tokens are, loads tell nothing, and the rules of places alone do."""
    rng, counts = np.random.default_rng(0), random_counts(7, (3, 2, 4, 8), most)
    plan = random_plan(counts, Topology(4, 2, 2, LINKS), seed=7, keep=0.6)
    names = ["expert_R", "rank_R", "slot_R", "fetched_R", "tokens_RG", "home_LE", "max_load_ML", "offsets"]
    valid = 0
    for _ in range(300):
        name = rng.choice(names)
        array = plan.tensors[name]
        place = tuple(int(rng.integers(n)) for n in array.shape)
        value = not array[place] if name == "fetched_R" else array[place] + rng.choice([-2, -1, 1, 2])
        other = changed(plan, name, place, value)
        try:
            verify(other, counts)
        except PlanError:
            assert not _is_valid(other, counts)
        else:
            assert _is_valid(other, counts)
            valid += 1
    assert 0 < valid < 100


def _is_valid(plan, counts):
    """What the contract says, assignment by assignment."""
    offsets = plan.hosts.offsets
    if offsets[0] != 0 or offsets[-1] != len(plan.hosts.expert_R) or (np.diff(offsets) < 0).any():
        return False
    if any(sorted(home_E) != sorted(np.arange(8) // 2) for home_E in plan.home_LE):
        return False
    held = {}
    return all(_is_valid_cell(plan, counts, held, *cell) for cell in np.ndindex(plan.shape[:2]))


def _is_valid_cell(plan, counts, held, m, layer):
    cell = plan.cell(m, layer)
    ranks_of = {expert: [home] for expert, home in enumerate(cell.home_E)}
    places = set()
    for expert, rank, slot, fetched in zip(cell.expert_R, cell.rank_R, cell.slot_R, cell.fetched_R, strict=True):
        if rank not in range(4) or slot not in range(2) or expert not in ranks_of or rank in ranks_of[expert]:
            return False
        if (held.get((layer, rank, slot)) == expert) == fetched:
            return False
        held[layer, rank, slot] = expert
        places.add((rank, slot))
        ranks_of[expert].append(rank)
    loads_G = np.zeros(4, int)
    for expert, source in np.ndindex(8, 4):
        given = {cell.rank_R[i]: cell.tokens_RG[i, source] for i in np.flatnonzero(cell.expert_R == expert)}
        home_serves = counts[m, layer, source, expert] - sum(given.values())
        if home_serves < 0 or min(given.values(), default=0) < 0:
            return False
        loads_G[cell.home_E[expert]] += home_serves
        for rank, tokens in given.items():
            loads_G[rank] += tokens
    return len(places) == len(cell.expert_R) and loads_G.max() == plan.max_load_ML[m, layer]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tolerance": 1}, r"tolerance is 1; .*below 1"),
        ({"threads": True}, r"threads.*True; .*whole number"),
        ({"slots": "both"}, r"slots.*'both'; .*'shared'"),
        ({"packing": "tokens"}, r"packing.*'tokens'; .*'routes'"),
        ({"traffic": True, "replicas": False}, r"traffic.*replicas=False"),
    ],
)
def test_impossible_options_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        PlanOptions(**wrong)
