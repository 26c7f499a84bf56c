"""A chunk on a device that counts the waits of the host: replay adds none."""

import contextlib
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch

from foreroute.adapters.megatron.forward_args import Call
from foreroute.adapters.megatron.route_shard import RouteShard
from foreroute.core.deferred_checks import DeferredChecks
from foreroute.ep import dispatch
from foreroute.errors import BatchMismatchError, LayoutError
from foreroute.layout import pack, pad
from foreroute.plan import PlanOptions, Topology
from foreroute.planner import plan
from foreroute.replay import Policy, RootRows
from foreroute.testing.counting_device import DEVICE, other_device
from tests.adapters.megatron import one_rank as on
from tests.adapters.megatron.executed_plans import LINKS
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.ep.test_host_waits import waiting

WHOLE, SHORT = (on.WIDTH, on.WIDTH), (on.WIDTH, on.WIDTH - 5)


class Chunk:
    """A model there, with two sequences and routes that no router chose.

    Attributes:
        device: with its count of waits.
        routed: the model.
        given: tokens, positions and the mask of attention, and of padding where there is any.
        trace: the routes.
        layout: of the batch.
    """

    def __init__(self, device, lengths, prepared):
        built, self.routed, ids, self.trace = prepared
        built.to(DEVICE)
        self.device, self.lengths, self._model = device, lengths, built
        positions, causal = torch.arange(on.WIDTH).expand_as(ids), torch.ones(on.WIDTH, on.WIDTH, dtype=torch.bool)
        self.given = [each.to(DEVICE) for each in (ids, positions, causal.triu(1)[None, None])]
        self.layout = pad(lengths, side="right", order="sbhd", to=on.WIDTH)
        self.padding = (torch.arange(on.WIDTH) >= torch.tensor(lengths)[:, None]).to(DEVICE)
        self.more = {}
        self.forward()  # what Megatron keeps is made

    def forward(self, *_):
        """Logits; called as a forward step too."""
        return self._model(*self.given, **self.more)

    def waits(self):
        self.device.reads.clear()
        self.forward()
        return sum(self.device.reads.values())


@contextlib.contextmanager
def chunk(lengths=WHOLE):
    """It was never called on the CPU: Megatron keeps what it computes of positions where it was computed."""
    prepared = on.prepared(lengths=lengths)
    current = torch.cuda.current_device
    with other_device() as device:
        torch.cuda.current_device = lambda: DEVICE
        try:
            yield Chunk(device, lengths, prepared)
        finally:
            torch.cuda.current_device = current


@on_ranks(1)
def test_a_replayed_forward_waits_for_nothing():
    for lengths, masked in ((WHOLE, False), (WHOLE, True), (SHORT, False), (SHORT, True)):
        with chunk(lengths) as there, torch.no_grad():
            there.more = {"padding_mask": there.padding} if masked else {}
            unpatched = there.waits()
            shard = there.routed.shard(there.trace, there.layout)
            for what in ((shard,), (there.trace, there.layout), (there.trace,)):
                with there.routed.replay(*what) as session:
                    assert there.waits() == unpatched, f"{lengths}, masked {masked}, {what}"
                    mask_BT = session.loss_mask_BT.values_here
                assert torch.equal(mask_BT, ~there.padding.values_here)
            with there.routed.listening(rows := RootRows(there.routed)), there.routed.replay(shard):
                assert there.waits() == unpatched, "roots are counted"
            assert rows.read(there.trace.lengths).roots_N.any()
            with a_read_put_back(), there.routed.replay(shard):
                assert there.waits() == unpatched + 1, "the device does not count"


@contextlib.contextmanager
def a_read_put_back():
    """The control: tokens are compared where the host waits for them."""
    compare = RouteShard._compare_tokens

    def reading(shard, tokens, mask, checks):
        tokens.cpu()
        compare(shard, tokens, mask, checks)

    with mock.patch.object(RouteShard, "_compare_tokens", reading):
        yield


@on_ranks(1)
def test_packed_batches_are_read_only_where_there_is_padding_in_them():
    """Their offsets are compared with those of the trace there, and told late."""
    _, routed = on.attached()
    lengths = (5, 7)
    ids = on.tokens(lengths=lengths)
    trace = on.foreign(routed.spec, ids, lengths=lengths)
    tokens = torch.cat([row[:length] for row, length in zip(ids, lengths, strict=True)])
    with other_device() as device:
        for slots, reads in (((5, 7), 0), ((6, 8), 1), ((4, 8), None)):
            given = torch.cat([tokens, tokens.new_zeros(sum(slots) - 12)])
            if reads == 1:
                given = torch.cat([tokens[:5], tokens.new_zeros(1), tokens[5:], tokens.new_zeros(1)])
            offsets = torch.tensor([0, slots[0], sum(slots)], dtype=torch.int32)
            packed = SimpleNamespace(cu_seqlens_q=offsets.to(DEVICE), cu_seqlens_q_padded=None)
            call = Call(given[None].to(DEVICE), packed, None, None, 0, len(given), DEVICE, routed.chunks[0])
            policy, checks = Policy("error", "spread", "native", False), DeferredChecks()
            device.reads.clear()
            rows = routed.routes_of(trace, None, policy).of_pass(0, call, policy, checks)
            if reads is None:
                on.refuses(LayoutError, "sequence 0 has 5 tokens", checks.wait)
                continue
            assert sum(device.reads.values()) == reads, slots
            checks.wait()
            expected = routed.shard(trace, pack(lengths, padded_lengths=slots)).rows(routed.layers, DEVICE)
            assert torch.equal(rows.ids_LRK.values_here, expected.ids_LRK.values_here)


@on_ranks(1)
def test_a_recorded_forward_waits_for_nothing():
    """What the batch holds is read when the trace is asked for, though it has been overwritten since."""
    for masked in (False, True):
        with chunk(SHORT) as there, torch.no_grad():
            there.more = {"padding_mask": there.padding} if masked else {}
            unpatched, ids = there.waits(), there.given[0].values_here.clone()
            with there.routed.record(margins=True) as recording:
                assert there.waits() == unpatched
            for each in (there.given[0], there.padding):
                each.zero_()
            lengths = SHORT if masked else WHOLE
            tokens = [recording.trace().tokens(s).tolist() for s in range(2)]
            assert tokens == [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]


def other_token(there):
    there.given[0][1, 3] = 0


def other_padding(there):
    there.padding[1, 0] = True


@on_ranks(1)
def test_what_is_wrong_is_told_when_the_session_ends():
    for spoil, message in (
        (None, None),
        (other_token, "token 0 in the batch"),
        (other_padding, "is a token to the trace and padding to the batch, by its padding_mask"),
    ):
        with chunk(SHORT) as there, torch.no_grad():
            there.more = {"padding_mask": there.padding}
            if spoil is not None:
                spoil(there)
            session = there.routed.replay(there.routed.shard(there.trace, there.layout))
            session.__enter__()
            there.forward()
            for each in (there.given[0], there.padding):
                each.zero_()  # what was given is remembered
            leave = lambda session=session: session.__exit__(None, None, None)  # noqa: E731
            if spoil is None:
                leave()
            else:
                on.refuses(BatchMismatchError, message, leave)


@on_ranks(1)
def test_a_planned_forward_waits_for_nothing():
    """Megatron's own dispatcher waits in every layer, for the rows that its masks select; under a plan nothing does."""
    with chunk() as there, torch.no_grad():
        routed, shard = there.routed, there.routed.shard(there.trace, there.layout)
        counts_MLGE = routed.gather_counts([shard])
        topology = Topology(num_ranks=1, ranks_per_node=1, redundant_slots=0, links=LINKS)
        made = plan(counts_MLGE, topology, PlanOptions(slots="shared"), home_LE=routed.home_LE)
        unpatched = there.waits()
        # what Megatron's model brings to the device in every forward
        around_layers = there.device.reads["to the device"]
        assert unpatched > around_layers
        # the control waits once, for all layers
        for is_spoilt in (False, True):
            spoilt = mock.patch.object(dispatch, "expand_segments", waiting) if is_spoilt else nullcontext()
            with spoilt, routed.execute(made, counts_MLGE, [shard]), routed.replay(shard):
                assert there.waits() == around_layers + is_spoilt, there.device.reads
