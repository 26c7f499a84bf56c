"""`fr.compare` on arrays: figures beside those of loops, errors beside a bootstrap and the truth, defects by name."""

import math

import numpy as np
import pytest

import foreroute as fr
from foreroute.doctor import Evidence, Severity, diagnose
from foreroute.doctor.evidence import TrainerPass
from foreroute.errors import InputError
from foreroute.mismatch import routing_mismatch, token_mismatch
from tests.mismatch import planted_defects as planted


def logprobs(seed, *, off=0.05, shape=(40, 30)):
    """Log-probs of an engine, those of a trainer that is off by so many nats, and a mask; padding is not a number."""
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < 0.7
    engine = -rng.exponential(1.5, shape) - 0.5
    trainer = engine + off * (rng.standard_normal(shape) + rng.standard_normal((len(engine), 1)))
    return np.where(mask, np.minimum(trainer, 0), np.nan), np.where(mask, engine, np.nan), mask


def routes(seed, plant=None, rate=0.1):
    """Padded routes of a trainer, those of an engine in which something is planted, and their mask; and their model."""
    rng, own = planted.case(seed)
    engine = planted.with_ids(own, planted.swapped(rng, own.expert_ids_NLK, own.spec, rate))
    engine = engine if plant is None else plant(rng, engine)
    engine = engine[0] if isinstance(engine, tuple) else engine
    (_, ids, attended), theirs = own.to_padded(), engine.to_padded().expert_ids_BTLK
    return {"trainer_routes": ids, "engine_routes": theirs, "attention_mask": attended}, own.spec


def test_the_figures_are_those_of_the_measures():
    """Which tests/mismatch/test_measures.py holds to loops."""
    trainer, engine, mask = logprobs(0, off=0.4)
    replayed = (trainer + engine) / 2
    given, _ = routes(0)
    compared = fr.compare(trainer, engine, mask, replayed_logprobs=replayed, **given)
    found = compared.metrics
    for prefix, by_trainer in (("", trainer), ("replayed/", replayed)):
        by_token = token_mismatch(by_trainer, engine, mask=mask)
        expected = [by_token.count, by_token.k3, by_token.f(1.5), by_token.f(2.0), by_token.max_abs_log]
        names = ("response_tokens", "k3", "f1.5", "f2", "max_abs_log_ratio")
        assert [found[prefix + name] for name in names] == expected
    assert found["gain"] == found["k3"] / found["replayed/k3"]
    of_sequence = [token_mismatch(trainer[s], engine[s], mask=mask[s]) for s in range(len(mask))]
    counts = [each.count for each in of_sequence]
    require_error(compared, "k3", counts, [each.k3 for each in of_sequence])
    require_error(compared, "f1.5", counts, [each.f(1.5) for each in of_sequence])
    require_error(compared, "f2", counts, [each.f(2.0) for each in of_sequence])
    by_row = routing_mismatch(given["engine_routes"], given["trainer_routes"], mask=given["attention_mask"])
    assert (found["routed_rows"], found["differing_share"]) == (by_row.rows, by_row.differing_share)
    assert found["differing_tokens_share"] == by_row.differing_tokens_share
    assert found["overlap"] == pytest.approx(by_row.overlap_L.mean())
    sides = zip(given["engine_routes"], given["trainer_routes"], given["attention_mask"], strict=True)
    of_sequence = [routing_mismatch(a[None], b[None], mask=kept[None]) for a, b, kept in sides]
    rows = [each.rows for each in of_sequence]
    for name in ("differing_share", "differing_tokens_share"):
        require_error(compared, name, rows, [getattr(each, name) for each in of_sequence])
    require_error(compared, "overlap", rows, [each.overlap_L.mean() for each in of_sequence])


def require_error(compared, name, weights, figures):
    """Of a ratio of sums over sequences, by hand."""
    apart = np.array(weights) * (np.array(figures) - compared.metrics[name])
    error = np.std(apart, ddof=1) * math.sqrt(len(apart)) / np.sum(weights)
    assert compared.errors[name] == pytest.approx(error, rel=1e-6) != 0


def test_tokens_of_unknown_sequences_have_figures_and_no_errors():
    trainer, engine, mask = logprobs(3)
    found = fr.compare(trainer[mask], engine[mask])
    assert found.metrics == fr.compare(trainer, engine, mask).metrics
    assert all(math.isnan(error) for error in found.errors.values())
    masked = fr.compare(trainer.reshape(-1), engine.reshape(-1), mask.reshape(-1))
    assert (masked.metrics, masked.errors.keys()) == (found.metrics, found.errors.keys())
    assert all(math.isnan(error) for error in masked.errors.values()), "a token is no sequence"


def test_where_routes_are_the_same_nobody_is_sent_to_replay():
    trainer, engine, mask = logprobs(5)
    given, spec = routes(5, rate=0.0)
    advice = [each.advice for each in fr.compare(trainer, engine, mask, **given, spec=spec).diagnosis.findings]
    assert any("one temperature" in each for each in advice)
    assert not any("with replay as well" in each for each in advice)


def test_roots_of_a_replayed_pass_have_shares_and_the_one_that_is_no_near_tie_is_named():
    trainer, engine, mask = logprobs(5)
    given, spec = routes(5, rate=0.5)
    theirs, own, attended = given["engine_routes"], given["trainer_routes"], given["attention_mask"]
    differs = (np.sort(theirs) != np.sort(own)).any(-1) & (theirs >= 0).all(-1) & (own >= 0).all(-1)
    is_root = differs & (np.random.default_rng(5).random(differs.shape) < 0.5)
    would = np.where(is_root[..., None], own, theirs)
    deficits = np.where(is_root, np.random.default_rng(6).uniform(0.01, 0.02, is_root.shape), 0.0)
    b, t, layer = np.argwhere(is_root)[-1]
    deficits[b, t, layer] = 9.0
    found = fr.compare(trainer, engine, mask, **given, replayed_routes=would, deficits=deficits, spec=spec)
    decisions = found.metrics["routed_rows"] * spec.num_layers
    assert found.metrics["roots_share"] == is_root.sum() / decisions > 0
    assert found.metrics["consequences_share"] == (differs & ~is_root).sum() / decisions > 0
    assert found.errors["roots_share"] > 0
    (far,) = found.diagnosis.measures.roots.far
    position = np.flatnonzero(attended[b]).tolist().index(t)
    assert (far.sequence, far.position, far.layer, far.deficit) == (b, position, layer, 9)
    assert "No near-tie: " in str([each.sentence for each in found.diagnosis.findings])


def test_a_defect_of_routes_is_named_from_arrays_alone():
    given, spec = routes(7, planted.shift)
    trainer, engine, mask = logprobs(4)
    for of_model in (None, spec):
        found = fr.compare(trainer, engine, mask, **given, spec=of_model).diagnosis
        assert found.headline.startswith("Fix this first: The engine's trace is shifted by"), found.headline
    fine = fr.compare(trainer, engine, mask, **routes(7)[0]).diagnosis
    assert fine.worst < Severity.PROBLEM, fine.headline


def moved(logprobs, tokens):
    """Token p has the log-prob of token p - n, in its row of the batch; what enters is of no token."""
    rng, out = np.random.default_rng(0), np.roll(logprobs, tokens, axis=1)
    edge = np.s_[:, :tokens] if tokens > 0 else np.s_[:, tokens:]
    out[edge] = -rng.exponential(1.5, out[edge].shape)
    return out


@pytest.mark.parametrize("tokens", [1, -1])
def test_log_probs_of_the_neighbouring_token_are_named(tokens):
    trainer, engine, _ = logprobs(8)
    trainer, engine, mask = (np.nan_to_num(trainer, nan=-1.0), np.nan_to_num(engine, nan=-1.0), np.ones((40, 30)))
    mask[::3, 20:] = 0
    found = fr.compare(trainer, moved(engine, tokens), mask, replayed_logprobs=trainer).diagnosis
    assert found.headline.startswith(
        f"Fix this first: The engine's log-probs are shifted by {tokens:+d} token: that of "
    )
    assert not any("Causes can be" in finding.sentence for finding in found.findings)
    for fine in (engine, moved(engine, 7)):  # which is no shift that is looked for
        straight = fr.compare(trainer, fine, mask, replayed_logprobs=trainer).diagnosis
        assert "shifted" not in straight.headline


@pytest.mark.parametrize("packed", [True, False])
def test_log_probs_of_other_sequences_are_named(packed):
    """Rows of a batch in another order, under the trainer's mask; or sequences that are packed in another order."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(12, 30, rng.integers(2, 40))
        mask = np.arange(30) < lengths[:, None]
        trainer, engine, _ = (np.nan_to_num(each, nan=-1.0) for each in logprobs(seed, shape=mask.shape))
        order = np.roll(np.arange(len(mask)), 1) if seed == 0 else rng.permutation(len(mask))
        if packed:
            theirs = np.concatenate([engine[s, : lengths[s]] for s in order])
            given = {"engine_logprobs_R": theirs, "response_lengths_S": lengths}
            found = diagnose(Evidence(**given, native=TrainerPass(None, trainer[mask])))
        else:
            found = fr.compare(trainer, engine[order], mask).diagnosis
        if (order == np.arange(len(order))).all():
            assert found.measures.order is None
        else:
            assert found.measures.order[0] == order.tolist()
            assert found.headline.startswith("Fix this first: The engine's log-probs are those of other sequences, of ")


def test_log_probs_that_are_apart_are_not_called_those_of_other_sequences():
    """Of engines with nothing in common, of tokens in another order, and of noise."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(4, 24, rng.integers(2, 60))
        own = -rng.exponential(1.0, lengths.sum()) * (rng.random(lengths.sum()) < rng.choice([0.3, 1]))
        unlike = (-rng.exponential(1.0, len(own)), rng.permutation(own), own - rng.exponential(0.5, len(own)))
        evidence = Evidence(
            engine_logprobs_R=unlike[seed % 3], response_lengths_S=lengths, native=TrainerPass(None, own)
        )
        assert diagnose(evidence).measures.order is None


def test_traces_have_the_figures_of_their_arrays_and_may_come_in_another_order():
    trainer, engine, mask = logprobs(10)
    _, own = planted.case(10)
    theirs = planted.natural(np.random.default_rng(0), own)
    (_, ids, attended), other = own.to_padded(), theirs.to_padded().expert_ids_BTLK
    given = {"trainer_routes": ids, "engine_routes": other, "attention_mask": attended, "spec": own.spec}
    arrays = fr.compare(trainer, engine, mask, **given)
    traces = fr.compare(trainer, engine, mask, trainer_routes=own, engine_routes=theirs)
    assert (arrays.metrics, arrays.errors) == (traces.metrics, traces.errors)
    turned = theirs.select(np.roll(np.arange(len(own)), 1))
    found = fr.compare(trainer, engine, mask, trainer_routes=own, engine_routes=turned)
    assert found.metrics["overlap"] == traces.metrics["overlap"]
    assert math.isnan(found.errors["overlap"])
    assert "in another order" in found.diagnosis.headline


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mask": None}, r"trainer.*float64 of shape \(40, 30\).*mask="),
        ({"replayed_logprobs": np.zeros(3)}, r"replay.*float64 of shape \(3,\)"),
        ({"engine_routes": None}, r"routes.*one side"),
        ({"engine_routes": np.zeros((2, 2))}, r"expected \[B, T, layers, picks\] of both"),
        ({"mask": np.zeros((40, 30)), "trainer_routes": None, "engine_routes": None}, r"nothing.*compare"),
        ({"deficits": np.zeros(3)}, "replayed_routes"),
    ],
)
def test_what_cannot_be_compared_is_refused(changed, message):
    trainer, engine, mask = logprobs(6)
    good = {"trainer_logprobs": trainer, "engine_logprobs": engine, "mask": mask, **routes(6)[0]}
    del good["attention_mask"]
    assert fr.compare(**good).metrics["routed_rows"] > 0
    with pytest.raises(InputError, match=message):
        fr.compare(**{**good, **changed})


def test_padding_and_half_precision_do_not_pass_for_mismatch():
    logprobs = -np.random.default_rng(0).exponential(1.0, (4, 9)).astype(np.float32)
    mask, tokens = np.ones((4, 9)), np.arange(9) < np.arange(6, 10)[:, None]
    with pytest.raises(InputError, match=r"mask marks 6 .*padding"):
        fr.compare(logprobs, logprobs, mask, attention_mask=tokens)
    with pytest.raises(InputError, match=r"\[4, 5\], without routes"):
        fr.compare(logprobs, logprobs, mask, attention_mask=tokens[:, :5])
    fr.compare(logprobs, logprobs, tokens, attention_mask=tokens)
    with pytest.warns(UserWarning, match=r"16 bits .engine"):
        fr.compare(logprobs, logprobs.astype(np.float16), tokens)
    other = logprobs * 1.01
    same = fr.compare(logprobs, other, mask, replayed_logprobs=logprobs).diagnosis
    assert any("the same in every bit" in each.advice for each in same.findings)
    apart = fr.compare(logprobs, other, mask, replayed_logprobs=logprobs * 1.0001).diagnosis
    assert not any("the same in every bit" in each.advice for each in apart.findings)
