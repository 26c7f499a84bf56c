"""verl's field checked on its device, held against the host's reader of the same batch. No verl needed."""

import numpy as np
import pytest

from foreroute.errors import CaptureError, ReplayError
from foreroute.trainers.verl import trace_of
from foreroute.trainers.verl.packed_batch import PackedBatch, PackedRoutes, require_routed
from tests.trainers.verl.verl_batches import SPEC, nested, sequences, telling_routes, unpadded


def spoilt(rng):
    """A batch in which something may be wrong, and how often: rows, ids, masks, lengths."""
    pairs = sequences(int(rng.integers(1, 5)), seed=int(rng.integers(1000)))
    batch = unpadded(
        pairs, lambda tokens: telling_routes(tokens, rows=int(rng.integers(len(tokens) - 2, len(tokens) + 1)))
    )
    routes, number = batch["routed_experts"].values(), int(rng.integers(len(batch["routed_experts"].values())))
    what = rng.integers(9)
    if what == 0:
        routes[number] = 0
    elif what == 1:
        routes[number, 1] = 5
    elif what == 2:
        routes[number, 2, 1] = rng.choice([-1, 63, 64, 99])
    elif what == 3:
        routes[number] = -1
    elif what in (4, 5):
        masks = [rng.integers(0, 2, len(response)) for _, response in pairs]
        masks[0][0] += 2 * (what == 5 and rng.random() < 0.3)
        batch["response_mask"] = nested(masks)
    elif what == 6:
        batch["response_mask"] = batch["response_mask"] * 0
    elif what == 7:
        batch["responses"] = batch["response_mask"] = nested([np.ones(len(p) + len(r) + 1, np.int64) for p, r in pairs])
    return batch


def refused(read):
    try:
        return None, read()
    except (CaptureError, ReplayError) as error:
        return error, None
    except ValueError as error:  # BatchMismatchError, of responses longer than sequences
        return error, None


def test_the_device_refuses_what_the_host_refuses_and_reads_the_same():
    rng, seen = np.random.default_rng(57), []

    def decode(batch):
        trace = trace_of(batch, model=SPEC)
        require_routed(trace, batch)
        return trace

    for _ in range(150):
        batch = spoilt(rng)
        error, expected = refused(lambda batch=batch: decode(batch))
        field = PackedRoutes(PackedBatch(batch), SPEC, lambda batch=batch: decode(batch))
        seen.append(error is not None)
        if error is None:
            found = field.trace()
            assert np.array_equal(found.valid_N, expected.valid_N)
            assert found.equals(expected)
        else:
            with pytest.raises(type(error), match=str(error)[:20].replace("[", ".")):
                field.trace()
    assert 20 < sum(seen) < 130
