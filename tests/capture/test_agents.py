"""Records of agents, read back: every row, log-prob, mask and weight version against the engine that was scripted."""

from pathlib import Path

import numpy as np
import pytest

from foreroute.capture.nemo_gym import read_nemo_gym
from foreroute.capture.skycap import read_skycap
from foreroute.trace import NO_VERSION, SAMPLING
from tests import scripted
from tests.scripted import SPEC
from tests.tiers import grid
from tests.traces import sets_of


def by_time(made, key):
    """The weights of a call, told by when it was made, as a caller who knows the updates of a run does."""
    return lambda call: {each.at: each.version for each in made}[call[key]]


def expect(generation, sequence, tokens, sampled, versions):
    """Compare one sequence: `sampled` has the version that sampled each position.

    `versions` has for each row the weights that computed it and those that are stated; None for an absent row.
    """
    one = generation.select([sequence])
    trace = one.trace
    assert trace.token_ids_N.tolist() == list(tokens)
    assert np.flatnonzero(one.sampled_N).tolist() == sorted(sampled)
    expected = [scripted.logprobs(tokens, version)[p] for p, version in sorted(sampled.items())]
    assert np.array_equal(one.logprobs_R, np.float32(expected))
    assert trace.valid_N.tolist() == [row is not None for row in versions]
    by_version = {row[0]: scripted.routes(tokens, row[0]) for row in versions if row is not None}
    for position, row in enumerate(versions):
        if row is not None:
            assert np.array_equal(trace.expert_ids_NLK[position], by_version[row[0]][position])
            assert trace.weight_versions_N[position] == row[1]


def check_gym(folder, seed):
    rng, made = np.random.default_rng([seed, 1]), scripted.script(seed)
    entries = [scripted.gym_entry(call, "0-0", int(rng.integers(5))) for call in made]
    order = rng.permutation(len(entries))
    path = scripted.write_gym(folder, [entries[i] for i in order])
    return made, read_gym(path, made)


def read_gym(path, made):
    return read_nemo_gym(path, model=SPEC, weight_version=by_time(made, "created_at"))


def expect_gym(made, read):
    calls, kept, trained = {call.name: call for call in made}, set(), set()
    for call in made:
        tries = [each for each in made if each.parent is call.parent and each.prompt == call.prompt]
        if call.children or tries == [call]:
            kept.add(call.name)
    for sequence, end in enumerate(read.ends):
        chain = calls[end].chain
        assert any(call.has_routes for call in chain)
        sampled, versions = {}, [None] * len(calls[end].tokens)
        for call in chain:
            if call.name in kept and call.name not in trained:
                trained.add(call.name)
                sampled |= dict.fromkeys(range(len(call.prompt), len(call.tokens)), call.version)
            for p in range(len(call.tokens) - 1 if call.has_routes else 0):
                versions[p] = versions[p] or (call.version, call.version)
        expect(read.generation, sequence, calls[end].tokens, sampled, versions)
    unrouted = {call.name for call in made if not any(each.has_routes for each in call.chain)}
    assert trained | unrouted >= kept
    assert trained <= kept
    for name in calls.keys() - trained:
        assert any(name in sentence for sentence in read.left_out) or name in unrouted


def check_skycap(folder, seed):
    rng, made = np.random.default_rng([seed, 2]), scripted.script(seed)
    graph = scripted.Skycap(made, masks=bool(rng.random() < 0.5), dtype=rng.choice([np.uint8, np.int16, np.int32]))
    for node in graph.nodes:
        if node.author == "model" and rng.random() < 0.05:
            node.logprobs = None
        if node.author == "client" and rng.random() < 0.02:
            node.media = [{"modality": "image", "offset": 0, "length": 1, "hash": "ab"}]
    path = scripted.write_skycap(folder, graph.document(), graph.arrays(), states_size=bool(rng.random() < 0.5))
    read = read_skycap(path, model=SPEC, weight_version=by_time(made, "t_start"), vocabulary_size=scripted.VOCABULARY)
    return made, graph, read


def expect_skycap(made, graph, read):
    version_of = {graph.node_of[call.name]: call.version for call in made}
    rows = {str(row["leaf"]): row for row in graph.samples()["rows"]}
    lost = []
    for leaf, row in rows.items():
        chain = graph.path(int(leaf))
        targets = [i for i in row["targets"] if graph.nodes[i].logprobs is not None]
        whole = chain[: max(map(chain.index, targets), default=-1) + 1]
        routed = sum(graph.nodes[i].rows is not None for i in whole)
        if any(graph.nodes[i].media for i in chain) or not targets or not routed:
            lost.append(leaf)
            continue
        tokens, sampled, versions = [], {}, []
        for i in whole:
            node = graph.nodes[i]
            goes_on = [call for call in made if call.parent and graph.node_of[call.parent.name] == i]
            nexts = {call.version for call in goes_on if call.has_routes}
            if i in targets:
                start = len(tokens) + node.sampled_start
                sampled |= dict.fromkeys(range(start, len(tokens) + len(node.tokens)), version_of[i])
            tokens += node.tokens
            versions += (
                [None] * len(node.tokens)
                if node.rows is None
                else [None if version is None else (version, version) for version in node.row_versions]
            )
            if node.author == "model" and versions[-1] is not None and len(nexts) != 1:
                versions[-1] = (versions[-1][0], NO_VERSION)
        versions[-1] = None
        if not any(versions):
            lost.append(leaf)
            continue
        [sequence] = [s for s, end in enumerate(read.ends) if end == str(whole[-1])]
        expect(read.generation, sequence, tokens, sampled, versions)
        if any(node.masks for node in graph.nodes):
            sets = [[scripted.mask(tokens, p + 1)] if p + 1 in sampled else None for p in range(len(tokens))]
            assert sets_of(read.generation.trace.select([sequence]).streams[SAMPLING]) == sets
    assert len(read.ends) == len(rows) - len(lost)
    for leaf in lost:
        assert any(sentence.startswith(f"the path to node {leaf} is left out") for sentence in read.left_out)


RECORDED = Path(__file__).parent / "recorded"
FORMS = {"nemo-gym": (check_gym, expect_gym), "skycap": (check_skycap, expect_skycap)}


@grid("form", FORMS, quick=2)
@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.exhaustive)], ids=str)
def test_scripted_rollouts_come_back(tmp_path, form, seeds):
    write_and_read, expect_all = FORMS[form]
    for seed in seeds:
        expect_all(*write_and_read(tmp_path, seed))


@pytest.mark.parametrize("seed", range(5))
def test_records_that_gyms_own_code_wrote_come_back(seed):
    """Of nemo-gym 0.7.0, whose entries equal those of the writer of the other tests."""
    made = scripted.script(seed)
    expect_gym(made, read_gym(RECORDED / f"{seed}-0.tokens.jsonl", made))
