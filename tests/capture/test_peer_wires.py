"""Routes as other frameworks hand them about: lists, tables, flat rows, SkyRL's batch and ms-swift's packed one."""

import base64
import json
from types import SimpleNamespace

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import decode
from foreroute.errors import CaptureError
from tests import wires
from tests.capture.test_refusals import table

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(18)
R, SHORT, LONG = (wires.rollout(RNG, prompt=p, response=g) for p, g in ((4, 3), (1, 2), (5, 6)))
ALL = (R, SHORT, LONG)
KNOWN = [fr.RoutingTrace.from_sequences(r.spec, [r.tokens], [r.routes_RLK]) for r in ALL]
TOKENS = [r.tokens for r in ALL]


def read(output, number=0, **given):
    return decode(output, model=R.spec, token_ids=[TOKENS[number]], **given)


def in_bytes(rows, write=bytes):
    return table(rows) | {"data": write(rows.tobytes())}


ROUTES = {
    "lists": np.ndarray.tolist,
    "flat": lambda rows: rows.reshape(len(rows), -1),
    "table of bytes": in_bytes,
    "table of base64 in a view": lambda rows: in_bytes(rows, lambda data: memoryview(base64.b64encode(data))),
    "table of uint16": lambda rows: table(rows.astype(np.uint16), __ndarray__=True),
}
"""AReaL's rows are flat; ms-swift's server marks its tables; verifiers' and renderers' have bytes."""


@pytest.mark.parametrize("form", ROUTES)
def test_routes_are_read_alone_in_a_list_as_text_and_inside_an_answer(form):
    write = ROUTES[form]
    mine, several = write(R.routes_RLK), [write(r.routes_RLK) for r in ALL]
    answer = wires.vllm_answer(R, routed_experts=mine)
    alone = [mine, [mine], write(R.all_layers()), answer]
    texts = [] if form == "flat" or " of b" in form else [json.dumps(mine), json.dumps(answer)]
    for output in (*alone, *texts):
        assert read(output).equals(KNOWN[0])
    for output in (several, *(json.dumps(several).encode() for _ in texts[:1])):
        assert decode(output, model=R.spec, token_ids=TOKENS).equals(fr.concatenate(KNOWN))


def test_a_table_may_state_where_it_starts():
    """prime-rl's and dynamo's do."""
    several = [table(R.routes_RLK[2:], start=2), table(SHORT.routes_RLK, start=0)]
    expected = [read(R.routes_RLK[2:], start=2), KNOWN[1]]
    assert decode(several, model=R.spec, token_ids=TOKENS[:2]).equals(fr.concatenate(expected))


def test_branches_of_verifiers_have_a_row_for_each_token():
    """The last of which copies the one before."""
    rows = [np.concatenate([r.routes_RLK, r.routes_RLK[-1:]]) for r in ALL]
    branches = [
        SimpleNamespace(token_ids=r.tokens, routed_experts=each, sampled_mask=[False] * len(each))
        for r, each in zip(ALL, rows, strict=True)
    ]
    assert decode(branches, model=R.spec).equals(fr.concatenate(KNOWN))
    branches[1].routed_experts = None
    with pytest.raises(CaptureError, match=r"output 1: .*no routed_experts"):
        decode(branches, model=R.spec)


def skyrl(rollouts, dtype):
    """SkyRL's training batch: padded on the left, zeros for padding and the last row; uint8 where ids fit."""
    width = max(len(r.tokens) for r in rollouts)
    routes = np.zeros((len(rollouts), width, *rollouts[0].routes_RLK.shape[1:]), dtype)
    tokens, mask = np.zeros((2, len(rollouts), width), np.int64)
    for b, r in enumerate(rollouts):
        first = width - len(r.tokens)
        tokens[b, first:], mask[b, first:] = r.tokens, 1
        routes[b, first:-1] = r.routes_RLK
    batch = {"sequences": tokens, "attention_mask": mask, "rollout_expert_indices": routes}
    return {name: torch.from_numpy(values) for name, values in batch.items()} | {"rewards": None}


@pytest.mark.parametrize("experts", [16, 256])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
def test_skyrls_batch_is_read_by_decode_and_by_minus_one(experts, dtype):
    rollouts = [wires.rollout(RNG, experts=experts, prompt=p, response=g) for p, g in ((4, 3), (1, 2), (5, 6))]
    spec, batch = rollouts[0].spec, skyrl(rollouts, dtype)
    known = fr.RoutingTrace.from_sequences(spec, [r.tokens for r in rollouts], [r.routes_RLK for r in rollouts])
    assert decode(batch, model=spec).equals(known)
    marked = batch["rollout_expert_indices"].clone()
    marked[(marked == 0).flatten(2).all(-1)] = -1
    padded = fr.RoutingTrace.from_padded(spec, batch["sequences"], marked, batch["attention_mask"])
    assert padded.equals(known)


def packed(rollouts, padding=0):
    """ms-swift's micro-batch with padding_free, its default: int64 [1, sum of T, L, K], positions and no mask."""
    rows = [np.concatenate([r.routes_RLK, np.zeros_like(r.routes_RLK[:1])]) for r in rollouts]
    rows.append(np.zeros((padding, *rows[0].shape[1:]), np.int64))
    tokens = [*(r.tokens for r in rollouts), [0] * padding]
    positions = [np.arange(len(each)) for each in tokens]
    parts = {"routed_experts": rows, "input_ids": tokens, "position_ids": positions}
    return {name: torch.from_numpy(np.concatenate(each).astype(int))[None] for name, each in parts.items()}


def test_a_packed_batch_is_cut_by_its_positions():
    batch = packed(ALL)
    assert decode(batch, model=R.spec).equals(fr.concatenate(KNOWN))
    assert decode(batch | {"attention_mask": None}, model=R.spec).equals(fr.concatenate(KNOWN))
    behind = decode(packed(ALL, padding=5), model=R.spec)  # a sequence of its own, without routes
    assert behind.select([0, 1, 2]).equals(fr.concatenate(KNOWN))
    assert not behind.select([3]).valid_N.any()


def test_padding_of_packed_rows_is_left_out_by_the_lengths():
    rows, lengths = [packed(ALL, padding=5), packed(ALL[::-1], padding=5)], [len(r.tokens) for r in ALL]
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    found = decode(batch | {"seq_lens": lengths + lengths[::-1]}, model=R.spec)
    assert found.equals(fr.concatenate([*KNOWN, *KNOWN[::-1]]))
    batch["position_ids"][:, -5:] = 0  # the first of them a sequence, and four of padding
    lengths = [*lengths, 1, *lengths[::-1], 1]
    assert decode(batch | {"seq_lens": lengths}, model=R.spec).lengths.tolist() == lengths


def test_lengths_that_are_not_those_of_a_packed_batch_are_refused():
    batch, lengths = packed(ALL, padding=2), [len(r.tokens) for r in ALL]
    for wrong in (lengths[::-1], [*lengths, 3], lengths + lengths, [[7]], [n + 1 for n in lengths], [-7, 3, 11]):
        with pytest.raises(CaptureError, match=r"seq_lens are .*at least|shape"):
            decode(batch | {"seq_lens": wrong}, model=R.spec)
    for outside in (lengths[:2], [5, 3, 11]):
        with pytest.raises(CaptureError, match=r"seq_lens are .*routes outside"):
            decode(batch | {"seq_lens": outside}, model=R.spec)
    batch["position_ids"][0, 3] += 1
    with pytest.raises(CaptureError, match=r"seq_lens are .*from 0"):
        decode(batch | {"seq_lens": lengths}, model=R.spec)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda batch: batch.pop("position_ids"), "lacks position_ids; expected .*attention_mask .*or position_ids"),
        (lambda batch: batch["position_ids"].add_(1), r"whole numbers.*count from 0"),
        (lambda batch: batch["position_ids"][0, -2:].zero_(), r"0 before another 0.*end"),
        (lambda batch: batch.update(attention_mask=batch["input_ids"] >= 0), r"position 6, .*give position_ids"),
        (lambda batch: batch["routed_experts"].copy_(batch["routed_experts"].roll(1, 1)), r"sequence 0.*routes for"),
    ],
)
def test_a_packed_batch_that_cannot_be_cut_is_refused(change, match):
    batch = packed(ALL)
    change(batch)
    with pytest.raises(CaptureError, match=match):
        decode(batch, model=R.spec)
