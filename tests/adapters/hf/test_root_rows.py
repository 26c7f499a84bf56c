"""Roots of each row: against what routers are seen to be given, in batches that are padded; and no wait of the host."""

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import InputError, ReplayError
from foreroute.replay import RootRows
from foreroute.testing.models import tiny
from tests.replay.root_oracle import beside
from tests.replay.session_subject import batch_of, foreign, router_paths

LENGTHS = (9, 6, 4)


def seen_natives(routed, run):
    """The sorted picks of every router, from what it is given, in the order of calls."""
    natives, handles = [], []
    for path in router_paths(routed):
        router = routed.model.get_submodule(path)

        def see(router, args):
            natives.append((args[0].detach() @ router.weight.T).topk(router.top_k, -1).indices.sort(-1).values.numpy())

        handles.append(router.register_forward_pre_hook(see))
    run()
    for handle in handles:
        handle.remove()
    return natives


def test_rows_are_counted_in_the_order_of_their_sequences():
    routed = hf.attach(tiny("qwen3_moe"))
    batch = batch_of(*LENGTHS)
    missing = {(s, length - 1) for s, length in enumerate(LENGTHS)} | {(1, 2)}
    trace = foreign(routed.spec, batch, absent=missing)
    # half of the rows are the model's own, and one stands twice
    with torch.no_grad(), routed.record() as recording:
        routed.model(batch.ids_BT, attention_mask=batch.real_BT.long(), use_cache=False)
    ids_NLK = trace.expert_ids_NLK
    ids_NLK[::2] = recording.trace().expert_ids_NLK[::2]
    ids_NLK[3] = ids_NLK[2]
    rows, expected = RootRows(routed), []
    with routed.listening(rows):
        for part in np.array_split(np.arange(len(LENGTHS)), 2):
            given, lengths = trace.select(part), [LENGTHS[s] for s in part]
            ids, mask = batch.ids_BT[list(part)], batch.real_BT[list(part)]
            # padded on the left
            ids, mask = (torch.stack([r.roll(9 - n) for r, n in zip(x, lengths, strict=True)]) for x in (ids, mask))

            def run(given=given, ids=ids, mask=mask):
                with torch.no_grad(), routed.replay(given, missing="native", padding="spread"):
                    routed.model(ids, attention_mask=mask.long(), use_cache=False)

            natives = [each.reshape(*mask.shape, -1)[mask.numpy()] for each in seen_natives(routed, run)]
            expected.append(beside(np.stack(natives, 1), given))
    found = rows.read(trace.lengths)
    for number, name in enumerate(("roots_N", "before_N", "after_N", "repeats_N")):
        assert np.array_equal(getattr(found, name), np.concatenate([each[number].sum(1) for each in expected])), name
        assert getattr(found, name).any()
    assert np.array_equal(found.roots_L, sum(each[0].sum(0) for each in expected))
    with pytest.raises(ReplayError, match="no pass"):  # it starts anew
        rows.read(trace.lengths)
    with routed.listening(rows):
        run()
    with pytest.raises(InputError, match=f"lengths_S has {sum(lengths) + 1} rows"):
        rows.read([*lengths, 1])
