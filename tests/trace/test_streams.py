"""Rows, turns, and decisions beside the routes: cut, joined and read with them, against plain lists by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreroute as fr
from foreroute.errors import BatchMismatchError, SpecMismatchError, TraceContentError
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import NO_VERSION, SAMPLING, DecisionStream, IndexerSpec, RoutingTrace, extended
from foreroute.trace.checks import as_offsets, join_ranges
from tests.traces import picks_of, random_trace, sets_of, spec_of, uneven_trace, with_decisions


def rows_of(trace):
    """Each sequence as a list of its rows: token, version, picks and all decisions."""
    decisions = [sets_of(trace.streams[name]) for name in sorted(trace.streams)]
    columns = trace.token_ids_N.tolist(), trace.weight_versions_N.tolist(), picks_of(trace), *decisions
    rows = [*zip(*columns, strict=True)]
    return [rows[a:b] for a, b in zip(trace.offsets[:-1].tolist(), trace.offsets[1:].tolist(), strict=True)]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), make=st.sampled_from([random_trace, uneven_trace]), data=st.data())
def test_every_operation_carries_rows_and_every_stream(seed, make, data):
    a, b = (with_decisions(make(each), each) for each in (seed, seed + 1))
    chosen = data.draw(st.lists(st.integers(0, len(a) - 1), max_size=6))
    assert rows_of(a.select(chosen)) == [rows_of(a)[s] for s in chosen]
    assert rows_of(fr.concatenate([a, b])) == rows_of(a) + rows_of(b)
    c = a.select(np.arange(len(a))[::-1])
    assert rows_of(a.continued_by(c)) == [x + y for x, y in zip(rows_of(a), rows_of(c), strict=True)]
    some = a.select_layers(a.spec.layers[1:])
    assert some.streams.keys() == a.streams.keys()
    assert rows_of(a.with_provenance(engine="x")) == rows_of(a)
    sorted_picks, later = a.without_pick_order(), a.with_weight_version(3)
    for name in (SAMPLING, "indexer"):
        assert sets_of(sorted_picks.streams[name]) == sets_of(later.streams[name]) == sets_of(a.streams[name])

    assert all(ids == sorted(ids) for row in picks_of(sorted_picks) if row for ids in row)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_cut_drops_the_mask_of_the_token_that_it_cuts_off(seed, data):
    trace = with_decisions(random_trace(seed), seed)
    kept = [data.draw(st.integers(0, int(n))) for n in trace.lengths]
    expected = [list(rows[:n]) for rows, n in zip(rows_of(trace), kept, strict=True)]
    for rows, n, whole in zip(expected, kept, trace.lengths, strict=True):
        if 0 < n < whole:
            rows[-1] = (*rows[-1][:-1], None)  # the names ascend: sampling is the last column
    assert rows_of(trace.truncated(kept)) == expected


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_later_turn_adds_to_the_decisions_of_an_earlier_one(seed):
    whole, other = with_decisions(random_trace(seed), seed), with_decisions(random_trace(seed), seed + 1)
    earlier = whole.truncated(whole.lengths // 2)
    for name, stream in extended(earlier, other).streams.items():
        expected = []
        for s in range(len(other)):
            first, second = (sets_of(each.select([s]).streams[name]) for each in (earlier, other))
            if first and second[len(first) - 1] is not None:  # its last row gave no token of the earlier turn
                first[-1] = None
            first += [None] * (len(second) - len(first))
            expected += [y if x is None else x for x, y in zip(first, second, strict=True)]
        assert sets_of(stream) == expected


def test_traces_with_and_without_a_stream_do_not_mix_by_accident():
    spec = spec_of()
    plain, tool = synthetic_trace(spec, [4], seed=0), fr.RoutingTrace.unrouted(spec, [[5, 6]])
    masks = DecisionStream.from_sets(50, [0, 1, 1, 0], [0, 2, 1, 0], [7, 3, 9])
    masked = plain.with_stream(SAMPLING, masks)
    assert sets_of(masked.continued_by(tool).streams[SAMPLING]) == [None, [[3, 7]], [[9]], None, None, None]
    with pytest.raises(TraceContentError, match=r"traces.*sampling"):
        fr.concatenate([masked, plain])
    absent = plain.with_stream(SAMPLING, DecisionStream.absent(50, 4))
    assert fr.concatenate([absent, masked]).streams[SAMPLING].valid_N.tolist() == [False] * 5 + [True] * 2 + [False]
    with pytest.raises(SpecMismatchError, match=r"below 51.*0 layers.*50"):
        fr.concatenate([masked, plain.with_stream(SAMPLING, DecisionStream.absent(51, 4))])
    assert fr.concatenate([masked.without_streams(), plain]).streams == {}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ids": [1, 1, 4]}, "row 0 has id 1 twice"),
        ({"ids": [1, 2, 50]}, r"ids go.*1 to 50; .*0 to 49"),
        ({"ids": [1, 2.5, 4]}, "float64 ids"),
        ({"ids": [1, 2]}, r"3 ids.*counts, .*2 are"),
        ({"counts": [2, 1]}, r"integer counts \[3, 1\]"),
        ({"counts": [3, -1, 1]}, r"lengths.*0 or more"),
        ({"valid": [1, 0, 0]}, r"without a decision.*ids"),
        ({"valid": [0.5, 1, 1]}, "expected bools"),
        ({"num_choices": 0}, "num_choices is 0"),
        ({"layers": [fr.RoutedLayer(1)] * 2}, "2 layers decide"),
    ],
)
def test_impossible_sets_are_refused(changed, message):
    good = {"num_choices": 50, "valid": [1, 0, 1], "counts": [2, 0, 1], "ids": [4, 1, 3]}
    assert sets_of(DecisionStream.from_sets(**good)) == [[[1, 4]], None, [[3]]]
    with pytest.raises(TraceContentError, match=message):
        DecisionStream.from_sets(**{**good, **changed})


@pytest.mark.parametrize("lengths", [[2**63 - 1, 2**63 - 1, 7], [3, -1], [2**62, 2**62]])
def test_lengths_whose_sum_wraps_are_refused(lengths):
    for use in (as_offsets, lambda lengths: join_ranges(np.zeros_like(lengths), lengths)):
        with pytest.raises(TraceContentError, match="lengths"):
            use(np.array(lengths, np.int64))


LAYERS = (fr.RoutedLayer(1), fr.RoutedLayer(4))
SPECS = {
    "tokens": IndexerSpec(3, LAYERS),
    "compressed entries": IndexerSpec(2, LAYERS, unit=4),
    "blocks of two heads": IndexerSpec(2, LAYERS, unit=3, heads=2, sees_begun=True),
}


def visible(spec, position):
    """The oracle: units with a token, or with their last token, at or before a position."""
    first_or_last = 0 if spec.sees_begun else spec.unit - 1
    return [u for u in range(position + 1) if u * spec.unit + first_or_last <= position]


def choices_of(spec, lengths, rng):
    """A stream by `IndexerSpec.stream`, and its sets by row and layer, empty where all is seen."""
    position_N = np.concatenate([np.arange(n) for n in lengths])
    layers, expected = [], []
    for _ in spec.layers:
        sets, is_part = [], []
        for p in position_N.tolist():
            units = [rng.permutation(visible(spec, p))[: spec.top_k].tolist() for _ in range(spec.heads)]
            sets.append(sorted(u * spec.heads + head for head, own in enumerate(units) for u in own))
            is_part.append(len(visible(spec, p)) > spec.top_k)
        layers.append((np.array([*map(len, sets)], np.int64), np.array([i for ids in sets for i in ids], np.int32)))
        expected.append([ids if part else [] for ids, part in zip(sets, is_part, strict=True)])
    return spec.stream(position_N, layers), [list(row) for row in zip(*expected, strict=True)]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(sorted(SPECS)))
def test_a_stream_holds_what_was_chosen_and_nothing_where_all_was(seed, name):
    spec, rng = SPECS[name], np.random.default_rng(seed)
    lengths = rng.integers(0, 15, 3)
    stream, expected = choices_of(spec, lengths, rng)
    assert sets_of(stream) == expected
    spec.check(stream, as_offsets(lengths))


@pytest.mark.parametrize("name", SPECS)
def test_a_row_says_by_its_sets_where_it_may_stand(name):
    spec = SPECS[name]
    stream, _ = choices_of(spec, [14], np.random.default_rng(0))
    offsets = np.array([0, 14])
    spec.check(stream, offsets)
    for rows in (np.roll(np.arange(14), 1), np.roll(np.arange(14), -1)):
        with pytest.raises(TraceContentError, match=r"sequence 0, position \d+.*decoder.*\d+"):
            spec.check(stream.take(rows), offsets)
    with pytest.raises(TraceContentError, match=r"belong.*another"):
        spec.check(stream, np.array([0, 7, 14]))  # of one sequence, and not of two
    spec.check(stream.without(np.arange(5, 9)), offsets)  # no choice is no wrong choice


SPEC = spec_of()


def routes(rng, rows):
    return np.argsort(rng.random((rows, SPEC.num_layers, SPEC.num_experts)), axis=-1)[..., : SPEC.top_k]


def turn(tokens, rows, start=0, versions=NO_VERSION):
    """A capture that has the rows of some positions alone."""
    whole, valid = np.zeros((len(tokens), *np.shape(rows)[1:]), int), np.zeros(len(tokens), bool)
    versions_T, here = np.full(len(tokens), NO_VERSION), slice(start, start + len(rows))
    whole[here], valid[here], versions_T[here] = rows, True, versions
    return RoutingTrace.from_rows(SPEC, [tokens], [whole], valid=[valid], weight_versions=[versions_T])


@settings(max_examples=50)
@given(st.data())
def test_turns_match_the_oracle(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    trace, slow, tokens, turns = RoutingTrace.unrouted(SPEC, [[]]), [], np.zeros(0, int), []
    for _ in range(data.draw(st.integers(1, 5))):
        last = len(tokens) - 1
        tokens = np.concatenate([tokens, rng.integers(0, 99, data.draw(st.integers(0, 6)))])
        start = data.draw(st.integers(0, len(tokens)))
        rows = routes(rng, data.draw(st.integers(0, len(tokens) - start)))
        versions = rng.integers(0, 4, len(rows))
        turns.append(turn(tokens, rows, start, versions))
        trace = extended(trace, turns[-1])
        slow += [(int(token), None, NO_VERSION) for token in tokens[len(slow) :]]
        for place, row, version in zip(range(start, len(tokens)), rows.tolist(), versions.tolist(), strict=False):
            if slow[place][1] is None or place == last:  # which gave no token of an earlier capture
                slow[place] = (slow[place][0], row, version)
    columns = (trace.token_ids_N, trace.expert_ids_NLK, trace.valid_N, trace.weight_versions_N)
    seen = [(t, ids if valid else None, v) for t, ids, valid, v in zip(*(c.tolist() for c in columns), strict=True)]
    assert seen == slow
    assert extended(*turns).equals(trace), "all turns in one call"


def test_what_does_not_continue_is_refused():
    rng = np.random.default_rng(3)
    start = turn([1, 2, 3], routes(rng, 2))
    with pytest.raises(BatchMismatchError, match=r"9.*position 1.*earlier.*2"):
        extended(start, turn([1, 9, 3, 4], routes(rng, 3)))
    with pytest.raises(BatchMismatchError, match="none shorter"):
        extended(start, turn([1, 2], routes(rng, 1)))
    with pytest.raises(BatchMismatchError, match="many"):
        extended(start, RoutingTrace.unrouted(SPEC, [[1, 2, 3], [2]]))
    with pytest.raises(SpecMismatchError):
        extended(start, RoutingTrace.unrouted(spec_of(num_experts=16), [[1, 2, 3]]))
    assert extended(start, start).equals(start)
