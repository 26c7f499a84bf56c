"""Shared prompts are stored once, whatever their order, and only when tokens, routes and versions are all the same."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreroute as fr
from foreroute.trace import synthetic_trace
from foreroute.trace.checks import join_ranges
from foreroute.trace.file.writing import MAX_EXPANSION, cut_blocks, share_prefixes
from tests.traces import mixed_trace, spec_of


def group(prompt_length, samples, *, answer=5, seed=0, spec=None):
    spec = spec or spec_of()
    prompt = synthetic_trace(spec, [prompt_length], seed=seed, complete=True).select([0] * samples)
    return prompt.continued_by(synthetic_trace(spec, [answer] * samples, seed=seed + 1))


def stored(trace):
    return len(share_prefixes(trace)[1])


def test_a_group_stores_its_prompt_once():
    assert stored(group(100, 8)) == 100 + 8 * 5


def test_shuffled_groups_below_one_system_prompt():
    spec = spec_of()
    system = synthetic_trace(spec, [64], seed=9, complete=True)
    groups = [system.select([0] * 4).continued_by(group(300, 4, seed=10 * g)) for g in range(3)]
    trace = fr.concatenate(groups).select(np.random.default_rng(0).permutation(12))
    assert stored(trace) == 64 + 3 * 300 + 12 * 5


@pytest.mark.parametrize("what", ["token", "route", "version", "gap"])
def test_a_prefix_ends_at_the_first_difference(what):
    trace = group(100, 2)
    tokens, ids = trace.token_ids_N.copy(), trace.expert_ids_NLK.copy()
    versions, valid = trace.weight_versions_N.copy(), trace.valid_N.copy()
    row = int(trace.offsets[1]) + 40
    if what == "token":
        tokens[row] += 1
    elif what == "route":
        ids[row, 2] = ids[row, 2][::-1]
    elif what == "version":
        versions[row] += 1
    else:
        valid[row], ids[row], versions[row] = False, 0, -1
    changed = replace(trace, token_ids_N=tokens, expert_ids_NLK=ids, weight_versions_N=versions, valid_N=valid)
    assert stored(changed) == 2 * 105 - 40


def test_short_likeness_is_not_worth_a_run():
    assert stored(group(10, 4)) == 4 * 15


def test_no_more_rows_than_the_format_allows(tmp_path):
    trace = group(200, 150, answer=0)
    _, rows, _ = share_prefixes(trace)
    assert trace.num_rows <= MAX_EXPANSION * len(rows)
    assert fr.load(fr.save(trace, tmp_path / "t", codec="planes")).equals(trace.without_pick_order())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_runs_rebuild_every_sequence(seed):
    trace = mixed_trace(seed)
    runs, rows, stored_S = share_prefixes(trace)
    assert len(rows) == stored_S.sum()
    for s in range(len(trace)):
        chain = slice(runs.offsets[s], runs.offsets[s + 1])
        found = rows[join_ranges(runs.starts[chain], runs.lengths[chain])]
        own = np.arange(trace.offsets[s], trace.offsets[s + 1])
        assert np.array_equal(trace.expert_ids_NLK[found], trace.expert_ids_NLK[own])
        assert np.array_equal(trace.token_ids_N[found], trace.token_ids_N[own])
        assert np.array_equal(trace.valid_N[found], trace.valid_N[own])
        assert np.array_equal(trace.weight_versions_N[found], trace.weight_versions_N[own])


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 9000), max_size=30), num_experts=st.sampled_from([8, 128, 512]))
def test_blocks_tile_the_rows_and_begin_with_a_sequence(lengths, num_experts):
    cuts = cut_blocks(np.array(lengths, np.int64), spec_of(num_experts)).tolist()
    ends = np.cumsum([0, *lengths]).tolist()
    aim = min(max(16 * num_experts, 1024), 8192)
    assert cuts[0] == 0
    assert cuts[-1] == sum(lengths)
    assert all(a < b <= a + 2 * aim for a, b in pairwise(cuts))
    for start, length in zip(ends, lengths, strict=False):
        inside = [cut for cut in cuts if start < cut < start + length]
        assert not inside or (length > 2 * aim and start in cuts)
