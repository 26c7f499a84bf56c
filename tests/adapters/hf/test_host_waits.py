"""On a device that counts waits: rows are found as NumPy finds them on the host, and faults told before updates."""

import copy
import itertools
from contextlib import nullcontext
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foreroute.adapters import hf
from foreroute.adapters.hf.trace_rows import TraceRows
from foreroute.errors import BatchMismatchError
from foreroute.layout import locate_rows, pad
from foreroute.replay import RootRows
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import batch_of, packed
from tests.replay.session_subject import Batch, foreign
from tests.tiers import grid

LENGTHS = (5, 4, 9)
SEQUENCES = np.split(np.arange(1, 19), np.cumsum(LENGTHS)[:-1])
OFFSETS = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
NONE = ((), (), ())


def padded(side):
    """The sequences in rows of 9, with a mask that alone says where they are."""
    batch = batch_of(*LENGTHS, side=side)
    batch["input_ids"][batch["attention_mask"].bool()] = torch.arange(1, 19)
    return batch


def as_pattern(batch):
    """With the pattern of causal attention that `generate` makes of a mask for a static cache."""
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    return batch | {"attention_mask": (causal & batch["attention_mask"].bool()[:, None])[:, None]}


BATCHES = {
    "left": padded("left"),
    "right": padded("right"),
    "left, with positions": padded("left") | {"position_ids": (padded("left")["attention_mask"].cumsum(1) - 1).clip(0)},
    "right, as a pattern": as_pattern(padded("right")),
    "packed": packed(SEQUENCES, [[0, 1, 2]]),
    "packed, with lengths": packed(SEQUENCES, [[0, 1, 2]]) | {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS},
    "packed in two rows": packed(SEQUENCES, [[0, 1], [2]]),
}
POLICIES = {
    "whole": ({}, NONE),
    "drop": ({"missing": "drop"}, ((2,), (), (0,))),
    "native": ({"missing": "native"}, ((2,), (), (0,))),
    "spread": ({"padding": "spread"}, NONE),
}


def trace_of(spec, missing=NONE, *, ends=(0, 1, 2)):
    """Routes that no router chose; those of these rows, and of the last row of sequences `ends`, are absent."""
    absent = {(s, p) for s, lacking in enumerate(missing) for p in lacking} | {(s, LENGTHS[s] - 1) for s in ends}
    return foreign(spec, Batch(padded("right")["input_ids"], LENGTHS), 3, absent)


@lru_cache
def model_on(device):
    """One for all batches. That on the CPU is the oracle; the other is asked for where the device is open."""
    return hf.attach(tiny("qwen3_moe", experts="batched_mm").to(device))


def given_on(device, batch):
    return {name: given.clone().to(device) for name, given in batch.items()}


def replayed(routed, batch, *what, **policy):
    with torch.no_grad(), routed.replay(*what, **policy) as session, routed.record() as recording:
        logits = routed.model(**batch, use_cache=False).logits
        mask_BT = session.loss_mask_BT
    here = [getattr(each, "values_here", each) for each in (logits, mask_BT)]
    return *here, recording.trace()


def waits(device, routed, given):
    """Of the host, in a forward without gradients."""
    device.reads.clear()
    with torch.no_grad():
        routed.model(**given, use_cache=False)
    return sum(device.reads.values())


def found_on_the_host(rows, batch, there, policy):
    """The oracle, and the control: a wait that is put back."""
    del policy
    located = torch.from_numpy(locate_rows(rows.trace, *batch.on_host()))
    return located.to(there.device), torch.zeros((), dtype=torch.bool, device=there.device)


@grid(("batch", "policy"), zip(BATCHES, itertools.cycle(POLICIES)), quick=4)
def test_rows_are_found_on_the_device_as_on_the_host(batch, policy, monkeypatch):
    here, batch, (policy, missing) = model_on("cpu"), BATCHES[batch], POLICIES[policy]
    trace = trace_of(here.spec, missing)
    seen_here = replayed(here, given_on("cpu", batch), trace, **policy)
    with monkeypatch.context() as on_the_host:
        on_the_host.setattr(TraceRows, "_locate", found_on_the_host)
        expected = replayed(here, given_on("cpu", batch), trace, **policy)
    assert all(map(torch.equal, seen_here[:2], expected[:2]))
    assert seen_here[2].equals(expected[2])
    with other_device() as device:
        there, given = model_on(DEVICE), given_on(DEVICE, batch)
        seen = replayed(there, given, trace, **policy)

        unpatched = waits(device, there, given)
        with there.replay(trace, **policy) as session:
            assert waits(device, there, given) == unpatched
            assert policy.get("missing") != "drop" or session.loss_mask_BT.any()
        monkeypatch.setattr(TraceRows, "_locate", found_on_the_host)
        with there.replay(trace, **policy) as session:
            assert waits(device, there, given) >= unpatched + 2
            assert policy.get("missing") != "drop" or session.loss_mask_BT.any()
    torch.testing.assert_close(seen[0], expected[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(seen[1], expected[1])
    assert seen[2].equals(expected[2])


REFUSED = {
    "other token": ("right", "input_ids", (2, 5), 3, r"sequence 2, position 5.*token 3.*15 in"),
    "other token, left": ("left", "input_ids", (1, 8), 3, r"sequence 1, position 3.*token 3.*9 in"),
    "no mask": ("right", "attention_mask", (0, 0), 2, "attention_mask holds 2"),
    "other pattern": ("right, as a pattern", "attention_mask", (2, 0, 6, 3), False, r"pattern.*causal"),
    "other start": ("packed", "position_ids", (0, 3), 0, r"4 sequences.*trace has 3"),
    "other lengths": ("packed, with lengths", "cu_seq_lens_q", 1, 4, r"restart at 0.*offsets"),
    "other end": ("packed, with lengths", "cu_seq_lens_q", 3, 20, "run from 0 to 20; expected 0 to 18"),
    "rows left out": ("right", "attention_mask", (2, slice(6, None)), 0, r"6 of 9 tokens.*leaves"),
    "longer": ("right", "attention_mask", (0, 5), 1, r"sequence 0.*6 tokens.*5 in"),
}


@grid(("name", "field", "place", "value", "message"), REFUSED.values(), ids=REFUSED, quick=5)
def test_what_the_device_finds_wrong_is_told_before_weights_change(name, field, place, value, message):
    batch = copy.deepcopy(BATCHES[name])
    batch[field][place] = value
    here = model_on("cpu")
    trace = trace_of(here.spec)
    with pytest.raises(BatchMismatchError, match=message), here.replay(trace):
        here.model(**given_on("cpu", batch), use_cache=False)
    with other_device() as device:
        there = model_on(DEVICE)
        for other in (BATCHES[name], batch):
            given, session = given_on(DEVICE, other), there.replay(trace)

            unpatched = waits(device, there, given)
            session.__enter__()
            assert waits(device, there, given) == unpatched, "what is wrong is not looked at in the forward"
            for each in given.values():
                each.zero_()  # what was given is remembered
            device.reads.clear()
            session.__exit__(None, None, None)
            assert not device.reads, "the end of a session with gradients does not wait"
        with pytest.raises(BatchMismatchError, match=message):
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()


LAYOUT = pad(LENGTHS, side="left", order="bshd", to=9)


@pytest.mark.parametrize(
    ("side", "missing", "layout", "message"),
    [
        ("left", NONE, LAYOUT, None),
        ("right", NONE, LAYOUT, "elsewhere"),
        ("right", ((3,), (), ()), None, r"0.*no route.*position 3.*1 later"),
    ],
)
def test_traces_and_layouts_are_taken_and_refused_there(side, missing, layout, message):
    with other_device(), nullcontext() if message is None else pytest.raises(BatchMismatchError, match=message):
        there = model_on(DEVICE)
        replayed(there, given_on(DEVICE, BATCHES[side]), trace_of(there.spec, missing), layout=layout)


def test_rows_made_once_are_compared_with_every_batch_though_nobody_counts_who_writes_to_it():
    """As a broadcast of c10d fills a buffer, which raises no version of a tensor."""
    with other_device():
        routed = model_on(DEVICE)
        rows, given = routed.rows(trace_of(routed.spec)), given_on(DEVICE, padded("left"))
        buffers = {name: each.values_here.numpy() for name, each in given.items()}
        replayed(routed, given, rows)
        buffers["input_ids"][1, 8] = 3
        assert not given["input_ids"]._version
        with pytest.raises(BatchMismatchError, match="sequence 1, position 3: token 3 in"):
            replayed(routed, given, rows)
        buffers["input_ids"][:] = padded("left")["input_ids"]
        replayed(routed, given, rows)
        for name, values in padded("right").items():
            buffers[name][:] = values
        # where nobody may wait to see that rows must be found anew
        with pytest.raises(BatchMismatchError, match=r"tensors.*overwritten"):
            replayed(routed, given, rows)
        expected = replayed(routed, given_on(DEVICE, padded("right")), routed.rows(rows.trace))
        assert torch.equal(replayed(routed, given, rows)[0], expected[0])


class Launches(TorchDispatchMode):
    """Counts operators while it is open."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def launches(routed, given):
    with Launches() as counted, torch.no_grad():
        routed.model(**given, use_cache=False)
    return counted.count


@pytest.mark.parametrize(("absent", "how", "added"), [((), {}, 0), ((0, 1, 2), {}, 3), ((), {"telemetry": True}, 2)])
def test_what_replay_adds_to_a_layer(absent, how, added):
    """Gathered weights, and no selection where all rows are known; else what tells native picks from the replayed."""
    of_layers = []
    for layers in (1, 3):
        routed = hf.attach(tiny("qwen3_moe", experts="batched_mm", num_hidden_layers=layers))
        given, trace = given_on("cpu", BATCHES["packed"]), trace_of(routed.spec, ends=absent)
        native = launches(routed, given)
        with routed.replay(trace, **how):
            of_layers.append(launches(routed, given) - native)
    assert of_layers[1] - of_layers[0] == 2 * added


@pytest.mark.parametrize("options", [{"margins": True}, {"native": True}])
def test_recordings_telemetry_and_roots_wait_for_nothing_and_keep_tokens_that_are_overwritten(options):
    here, batch = model_on("cpu"), padded("right")
    with torch.no_grad(), here.record() as expected:
        here.model(**given_on("cpu", batch), use_cache=False)
    with other_device() as device, torch.no_grad():
        there, given = model_on(DEVICE), given_on(DEVICE, batch)

        unpatched = waits(device, there, given)
        with there.record(**options) as recording:
            assert waits(device, there, given) == unpatched
        with there.replay(trace_of(there.spec), telemetry=True) as session:
            assert waits(device, there, given) == unpatched
        with there.listening(roots := RootRows(there)), there.replay(trace_of(there.spec)):
            assert waits(device, there, given) == unpatched
        for each in given.values():
            each.zero_()
        assert roots.read(LENGTHS).roots_N.any()
        assert recording.trace().equals(expected.trace())
        assert session.agreement().rows == sum(LENGTHS) - len(LENGTHS)
