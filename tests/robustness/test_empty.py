"""Nothing at public doors: an answer of 0 that adds up, or an error in words; and masked entries, which hide values."""

from contextlib import nullcontext
from itertools import count

import numpy as np
import pytest
import torch

import foreroute as fr
from foreroute import layout, mismatch, planner, records
from foreroute import plan as plans
from foreroute import trace as traces
from foreroute.adapters import hf
from foreroute.capture import Generation, load_generation, save_generation
from foreroute.doctor import Evidence, diagnose
from foreroute.doctor.evidence import TrainerPass
from foreroute.errors import ForerouteError, InputError
from foreroute.mismatch import routing_mismatch, token_mismatch
from foreroute.plan.counts import check_counts
from foreroute.report import write_diagnosis
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import SAMPLING, DecisionStream
from foreroute.trainers.verl import routed_experts
from foreroute.trainers.verl import trace_of as verl_trace
from tests.traces import random_trace, uneven_trace

SPEC = fr.RoutingSpec(8, 2, tuple(map(fr.RoutedLayer, range(3))))
FULL = synthetic_trace(SPEC, [4, 3], seed=0)
TOPOLOGY = plans.Topology(2, 2, 1, plans.Links(1e11, 1e10, 1e10, 1e-5, 1e-5))
NUMBERS = count()

EMPTY = {
    "no sequences": FULL.select([]),
    "of layers that differ": uneven_trace(0).select([]),
    "sequences of no token": FULL.truncated([0, 0]),
    "one of them": FULL.truncated([0, 3]).with_stream(SAMPLING, DecisionStream.absent(9, 3)),
    "no row routed": fr.RoutingTrace.unrouted(SPEC, [[1, 2], [3]]),
}


def fresh(folder):
    return folder / f"{next(NUMBERS)}.safetensors"


def planned(t, folder):
    counts = plans.packed_counts(t, layout.pack_sequences(t.lengths, 2, 100))
    found, _ = planner.plan_and_why(counts, TOPOLOGY)
    plans.verify(found, counts)
    plans.load_plan(plans.save_plan(found, fresh(folder)))
    assert plans.load_counts(plans.save_counts(counts, fresh(folder))).tolist() == counts.tolist()


def saved_and_read(trace, folder):
    path = fr.save(trace, fresh(folder))
    assert fr.load(path).equals(trace.without_pick_order())
    assert len(fr.load(path, sequences=[])) == 0
    folder = fresh(folder)
    for part in range(2):
        traces.save_part(trace.select([]) if part else trace, folder, part, 2, encoding="ordered")
    assert traces.load_parts(folder).equals(trace)


def padded_and_back(t, _):
    back = fr.RoutingTrace.from_padded(t.spec, *t.to_padded())
    assert back.equals(t.without_streams(*t.streams).with_weight_version(-1))


def generated(t, folder):
    none = Generation(t.select([]), np.zeros(0, np.int64), np.zeros(0, np.float32))
    back = load_generation(save_generation(none, fresh(folder)))
    assert len(Generation.concatenate([back, back.select([])])) == 0


def located(t, _):
    for shape in ((0, 0), (1, 0), (len(t), 4)):
        layout.locate_rows(t, np.zeros(shape, np.int64), np.zeros(shape, np.int64))


def laid_out(t, _):
    for each in (
        layout.pack(t.lengths, align=4).split_context(2, 1),
        layout.pack(t.lengths).align_total(2).split_sequence(2, 0),
        layout.pad(t.lengths, side="right", order="sbhd", to=4),
    ):
        layout.take_routes(t, each.rows())


def compared(t, _):
    for shape in ((0,), (0, 3), (3, 0)):
        with pytest.raises(ForerouteError, match=r"nothing.*compare"):
            fr.compare(np.zeros(shape), np.zeros(shape), np.zeros(shape))
    none = np.zeros(t.expert_ids_NLK.shape[:2])
    fr.compare(np.zeros(0), np.zeros(0), trainer_routes=t, engine_routes=t, replayed_routes=t, deficits=none)


def examined(t, folder):
    evidence = Evidence(engine=t, native=TrainerPass(t, np.zeros(2)), engine_logprobs_R=np.zeros(2))
    write_diagnosis(diagnose(evidence), folder / f"{next(NUMBERS)}.html")


def added_up(t, _):
    whole, none = routing_mismatch(FULL, FULL), routing_mismatch(FULL.select([]), FULL.select([]))
    assert all(np.array_equal(value, vars(whole + none)[name]) for name, value in vars(whole).items())
    some = token_mismatch(np.full(3, -1.0), np.full(3, -2.0))
    for shape in ((0,), (0, 3), (3, 0)):
        assert some + token_mismatch(np.zeros(shape), np.zeros(shape), mask=np.zeros(shape)) == some
    assert fr.concatenate([t, t.select([])]).equals(t)
    assert mismatch.margin_histogram(np.zeros((0, 3))).sum() == 0
    assert records.alarms([]) == []


def replayed():
    sizes = {"vocab_size": 9, "hidden_size": 32, "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}
    model = hf.build_model("qwen3_moe", seed=0, **sizes)
    routed, padding = hf.attach(model), torch.zeros((1, 4), dtype=torch.long)
    with routed.replay(fr.RoutingTrace.unrouted(routed.spec, []), telemetry=True) as session:
        model(input_ids=padding, attention_mask=padding)
    found = session.agreement()
    assert (found + found).rows == 0
    with routed.record(margins=True) as recorded:
        model(input_ids=padding, attention_mask=padding)
    assert (recorded.trace().num_rows, recorded.margins_NL().shape) == (0, (0, 3))


def of_verl():
    ids = torch.zeros((0, 4), dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": ids, "routed_experts": torch.zeros((0, 4, 3, 2), dtype=torch.int16)}
    assert len(routed_experts(verl_trace(batch, model=SPEC), batch)) == 0


def known(t, _):
    """Rows at the homes of two ranks."""
    homes = np.repeat([[0] * 4 + [1] * 4], t.spec.num_layers, axis=0)
    plans.known_rows(t, homes, packing=layout.pack_sequences(t.lengths, 2, 100)).policies()


def exchanged(t, _):
    """All in one of two micro-steps, of one rank."""
    nowhere = np.zeros(len(t), np.int32)
    counts = np.zeros((len(t), 1, 4), np.int32)
    layout.exchange_sequences(layout.Packing(nowhere, nowhere, 2, 1), t.lengths, counts)


DOORS = {
    "compare": compared,
    "files": saved_and_read,
    "rows": lambda t, _: (traces.digest(t), traces.extended(t, t), t.with_weight_version(1), t.continued_by(t)),
    "padded": padded_and_back,
    "generation": generated,
    "locate_rows": located,
    "layouts": laid_out,
    "plans": planned,
    "exchange_sequences": exchanged,
    "sequence_counts": lambda t, _: plans.sequence_counts(t),
    "known_rows": known,
    "explain": lambda t, _: mismatch.explain(t, t),
    "root_mismatch": lambda t, _: mismatch.root_mismatch(t, t, t).steep,
    "mismatches": added_up,
    "diagnose": examined,
}
NO_SEQUENCES = {"no sequences", "of layers that differ"}
NO_ROUTES = NO_SEQUENCES | {"sequences of no token", "no row routed"}
REFUSES = {
    "compare": ("nothing.*compare.*both sides", NO_ROUTES),
    "locate_rows": ("0 sequences.*trace has 2", EMPTY.keys() - NO_SEQUENCES),
    "layouts": ("cannot take.*different sizes", {"of layers that differ"}),
    "plans": ("no sequence.*pack", NO_SEQUENCES),
    "sequence_counts": ("plan cannot.*layers", {"of layers that differ"}),
    "known_rows": ("no sequence.*pack", NO_SEQUENCES),
    "explain": ("no row.*both traces", NO_ROUTES),
}
"""The doors that refuse: in which words, and which traces."""

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.mark.parametrize("door", DOORS)
def test_empty_traces_are_answered_or_refused_in_words(door, tmp_path):
    words, which = REFUSES.get(door, (None, ()))
    for name, trace in EMPTY.items():
        with pytest.raises(ForerouteError, match=words) if name in which else nullcontext():
            DOORS[door](trace, tmp_path)


@pytest.mark.parametrize("door", [replayed, of_verl])
def test_nothing_is_replayed_and_handed_on(door):
    door()


ONE_LAYER = fr.RoutingSpec(8, 2, (fr.RoutedLayer(0),))
HIDDEN = np.ma.array([1, 2], mask=[False, True])
ROUTES = np.ma.array([[[0, 1]], [[2, 3]]], mask=[[[False, False]], [[True, True]]])
TWO_TOKENS = fr.RoutingTrace.from_sequences(ONE_LAYER, [[1, 2]], [[[[0, 1]]]])
COUNTS = np.ma.masked_equal(np.arange(4).reshape(1, 1, 2, 2), 3)
LOGPROBS = np.ma.array([-0.5, -700.0], mask=[False, True])
MASK = np.ma.array([[True, True]], mask=[[False, True]])
MASKED = {
    "tokens": lambda: fr.RoutingTrace.from_sequences(ONE_LAYER, [HIDDEN], [[[[0, 1]], [[2, 3]]]]),
    "routes": lambda: fr.RoutingTrace.from_sequences(ONE_LAYER, [[1, 2]], [ROUTES]),
    "an attention mask": lambda: fr.RoutingTrace.from_padded(ONE_LAYER, [[1, 2]], [[[[0, 1]], [[2, 3]]]], MASK),
    "lengths": lambda: layout.pack(HIDDEN),
    "a batch": lambda: layout.locate_rows(random_trace(0), HIDDEN[None]),
    "values of ranks": lambda: layout.collect([(layout.pack([2]).rows(), LOGPROBS)]),
    "counts": lambda: check_counts(COUNTS),
    "log-probs": lambda: mismatch.token_mismatch(LOGPROBS, [-0.5, -0.5]),
    "log-probs of a generation": lambda: Generation(
        TWO_TOKENS, np.array([1]), LOGPROBS[1:].astype(np.float32), np.array([False, True])
    ),
    "sampled tokens": lambda: Generation(TWO_TOKENS, np.array([1]), np.zeros(1, np.float32), HIDDEN - 1 == 0),
    "margins": lambda: mismatch.margin_histogram(np.ma.array([[0.1], [0.2]], mask=[[True], [False]])),
}


@pytest.mark.parametrize("door", MASKED)
def test_an_array_with_masked_entries_is_refused(door):
    with pytest.raises(InputError, match=r"masked.(entries|array)"):
        MASKED[door]()
