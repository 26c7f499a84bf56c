"""Engines whose rows freeze, and healthy ones that look a little like it, before `decode` and the doctor."""

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import decode
from foreroute.errors import CaptureError

RNG = np.random.default_rng(11)


def spec_of(experts, top_k, layers=6):
    return fr.RoutingSpec(experts, top_k, tuple(fr.RoutedLayer(i) for i in range(layers)))


def healthy(spec, rows, *, hot=0.0):
    """Rows [R, L, K] of any experts; a `hot` share of the rows of layer 0 goes to its first K."""
    ids = np.argsort(RNG.random((rows, spec.num_layers, spec.num_experts)), axis=-1)[..., : spec.top_k]
    ids[RNG.random(rows) < hot, 0] = np.arange(spec.top_k)
    return ids


def read(spec, *sequences, tokens=None):
    """A trace of routes [R, L, K], with different tokens unless they are given."""
    given = tokens or [RNG.permutation(30_000)[: len(rows) + 1] for rows in sequences]
    return decode(list(sequences), model=spec, token_ids=[list(map(int, each)) for each in given])


def freeze(rows, first, count, layers=slice(None)):
    frozen = rows.copy()
    frozen[first : first + count, layers] = frozen[first, layers]
    return frozen


WIDE = spec_of(128, 8, layers=8)


@pytest.mark.parametrize("layers", [slice(None), [3], [0, 5]], ids=["all layers", "one", "first and last"])
@pytest.mark.parametrize(("first", "count"), [(16, 183), (0, 40), (150, 49)])
def test_rows_that_freeze_in_one_request_of_two_are_refused_by_name(first, count, layers):
    rows, other = healthy(WIDE, 199), healthy(WIDE, 60)
    read(WIDE, other, rows)
    layer = 0 if layers == slice(None) else layers[0]
    with pytest.raises(CaptureError, match=rf"sequence 1, position {first}: decoder {layer} sends {count} .*froze"):
        read(WIDE, other, freeze(rows, first, count, layers))


@pytest.mark.parametrize("first", range(90, 107))
def test_thirty_two_rows_of_one_layer_are_enough_wherever_they_begin_and_thirty_one_are_not(first):
    rows = healthy(WIDE, 199)
    read(WIDE, freeze(rows, first, 31, [3]))
    with pytest.raises(CaptureError, match=rf"sequence 0, position {first}: decoder 3 sends 32 rows"):
        read(WIDE, freeze(rows, first, 32, [3]))


def test_a_layer_that_never_changes_over_short_requests_is_refused():
    spec = spec_of(16, 2)
    sequences = [healthy(spec, 9) for _ in range(6)]
    for rows in sequences:
        rows[:, 4] = [3, 11]
    with pytest.raises(CaptureError, match=r"decoder 4 sends 54 rows.* to experts \[3, 11\]"):
        read(spec, *sequences)


@pytest.mark.parametrize(("experts", "top_k"), [(2, 1), (4, 1), (8, 2), (4, 3)])
@pytest.mark.parametrize("hot", [0.0, 0.3, 0.5, 0.6, 0.9, 0.99])
def test_healthy_routers_of_few_experts_pass(experts, top_k, hot):
    """Also one that sends most tokens to one set, whose runs are long."""
    spec = spec_of(experts, top_k)
    for _ in range(3):
        read(spec, healthy(spec, 3000, hot=hot), healthy(spec, 50, hot=hot))


@pytest.mark.parametrize("at", [1, 17, 50, 98])
def test_the_row_of_another_token_is_refused(at):
    """In all layers: one such row is enough."""
    rows = healthy(WIDE, 99)
    rows[at] = rows[at - 1]
    with pytest.raises(CaptureError, match=rf"position {at}: .*token \d+.*{at - 1}, in all 8"):
        read(WIDE, rows)
    same = np.arange(100) + 7
    same[at] = same[at - 1]  # a token that comes twice may be routed twice alike
    assert read(WIDE, rows, tokens=[same]).valid_N.sum() == 99
    rows[at, 0] = healthy(WIDE, 1)[0, 0]
    read(WIDE, rows, rows[:60])  # rows of two requests may be alike, as those of one prompt are


def test_the_row_of_another_token_is_no_wonder_in_a_small_model():
    """19 layers of two bits, where 30 and twice log2(20) are needed: 38.6. Nor where routers have nearly collapsed."""
    spec = spec_of(8, 2, layers=19)
    rows = healthy(spec, 20)
    rows[5] = rows[4]
    read(spec, rows)
    spec = spec_of(8, 2, layers=48)
    rows = np.where(RNG.random((300, 48, 1)) < 0.98, [0, 1], healthy(spec, 300))
    assert (rows[:, None] == rows).all((-1, -2)).sum() > 600
    read(spec, rows)


def test_the_doctor_names_frozen_rows_unless_the_trainer_routes_so_too():
    rows, tokens = healthy(WIDE, 80), RNG.permutation(500)[:80]
    engine, trainer = (fr.RoutingTrace.from_sequences(WIDE, [tokens], [ids]) for ids in (freeze(rows, 30, 40), rows))
    logprobs = -RNG.random(79)

    def sentences(engine, trainer):
        found = fr.compare(logprobs, logprobs, engine_routes=engine, trainer_routes=trainer)
        return [finding.sentence for finding in found.diagnosis.findings if "froze" in finding.sentence]

    (found,) = sentences(engine, trainer)
    assert found.startswith("In the engine's trace, sequence 0, position 30: decoder 0 sends 40 rows")
    assert not sentences(trainer, trainer)
    assert not sentences(engine, engine)
