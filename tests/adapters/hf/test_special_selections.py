"""Selections that are no single top-k of a router's own forward, beyond what `test_every_family` asks of all."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute.capture import decode
from foreroute.doctor.examine import examine
from foreroute.errors import BatchMismatchError
from foreroute.trace import LayerKind
from tests.adapters.hf.family_checks import attached, foreign_routes, run


def test_a_trace_that_is_shifted_against_its_tokens_disagrees_with_the_hash_layers():
    _, routed = attached("deepseek_v4")
    trace = foreign_routes(routed)
    assert [layer.kind for layer in routed.spec.layers] == [LayerKind.HASH, LayerKind.DECODER, LayerKind.DECODER]
    shifted = [np.roll(ids, 1, axis=0) for ids in np.split(trace.expert_ids_NLK, trace.offsets[1:-1])]
    with (
        pytest.raises(BatchMismatchError, match=r"0 routes.*table.*0.*\d+"),
        routed.replay(replace(trace, expert_ids_NLK=np.concatenate(shifted))),
    ):
        run(routed.model)


def test_an_engines_trace_without_the_hash_layers_replays_the_others_and_leaves_these_native():
    model, routed = attached("deepseek_v4")
    whole = foreign_routes(routed)
    parts = np.split(whole.expert_ids_NLK.copy(), whole.offsets[1:-1])
    for ids in parts:
        ids[:, 0] = 0
    tokens = [whole.tokens(s) for s in range(len(whole))]
    assert whole.valid_N.all()
    captured = decode([ids[:-1] for ids in parts], model=routed.spec, token_ids=tokens)
    assert captured.spec == routed.spec.select(routed.spec.layers[1:])
    with routed.replay(captured), routed.record() as recording, torch.no_grad():
        run(model)
    replayed = recording.trace()
    assert np.array_equal(replayed.expert_ids_NLK[captured.valid_N], whole.expert_ids_NLK[captured.valid_N])
    assert np.array_equal(replayed.expert_ids_NLK[:, 0], whole.expert_ids_NLK[:, 0])
    assert examine(model, None, trace=captured).replay_error == ""
    with pytest.raises(BatchMismatchError, match=r"1000000.*model's.*experts"):
        routed.rows(decode(parts[0], model=routed.spec, token_ids=[1_000_000] * len(parts[0])))
