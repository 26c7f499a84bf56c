"""A chunk on a device that counts the waits of the host: replay adds none."""

import contextlib
from unittest import mock

import torch

from foreroute.ep import dispatch
from foreroute.layout import pad
from foreroute.plan import PlanOptions, Topology
from foreroute.planner import plan
from foreroute.replay import RootRows
from foreroute.testing.counting_device import DEVICE, other_device
from tests.adapters.megatron.executed_plans import LINKS
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.one_rank import MegatronSubject, model
from tests.ep.test_host_waits import waiting
from tests.replay.session_subject import batch_of, foreign

WIDTH = 12
WHOLE, SHORT = batch_of(WIDTH, WIDTH), batch_of(WIDTH, 7)


class Chunk:
    """A model there, with two sequences and routes that no router chose."""

    def __init__(self, device, batch, on, trace, masked):
        self.device, self.model, self.routed = device, on.model.to(DEVICE), on.routed
        self.trace, self.padding = trace, (~batch.real_BT).to(DEVICE)
        self.layout = pad(batch.lengths, side="right", order="sbhd", to=WIDTH)
        causal = torch.ones(WIDTH, WIDTH, dtype=torch.bool).triu(1)[None, None]
        given = batch.ids_BT, torch.arange(WIDTH).expand_as(batch.ids_BT), causal
        self.given = [each.clone().to(DEVICE) for each in given]
        self.more = {"padding_mask": self.padding} if masked else {}
        self.waits()  # what Megatron keeps is made

    def waits(self):
        self.device.reads.clear()
        self.model(*self.given, **self.more)
        return sum(self.device.reads.values())


@contextlib.contextmanager
def chunk(batch=WHOLE, *, masked=False):
    """It was never called on the CPU: Megatron keeps what it computes of positions where it was computed."""
    on = MegatronSubject(model(layers=2))
    trace = foreign(on.routed.spec, batch)
    with other_device() as device, mock.patch.object(torch.cuda, "current_device", return_value=DEVICE):
        yield Chunk(device, batch, on, trace, masked)


@on_ranks(1)
def test_replayed_and_recorded_forwards_wait_for_nothing():
    for batch, masked in ((WHOLE, False), (SHORT, False), (SHORT, True)):
        with chunk(batch, masked=masked) as there, torch.no_grad():
            unpatched = there.waits()
            shard = there.routed.shard(there.trace, there.layout)
            for what in ((shard,), (there.trace, there.layout), (there.trace,)):
                with there.routed.replay(*what) as session:
                    assert there.waits() == unpatched, f"{batch.lengths}, masked {masked}, {what}"
                    mask_BT = session.loss_mask_BT.values_here
                assert torch.equal(mask_BT, batch.real_BT)
            with there.routed.listening(rows := RootRows(there.routed)), there.routed.replay(shard):
                assert there.waits() == unpatched, "roots are counted"
            assert rows.read(there.trace.lengths).roots_N.any()
            with there.routed.record(margins=True) as recording:
                assert there.waits() == unpatched
            # what the batch holds is read when the trace is asked for, though it has been overwritten since
            there.given[0].zero_()
            there.padding.zero_()
            trace, lengths = recording.trace(), batch.lengths if masked else WHOLE.lengths
            for s, length in enumerate(lengths):
                assert trace.tokens(s).tolist() == batch.ids_BT[s, :length].tolist()


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
            spoilt = mock.patch.object(dispatch, "expand_segments", waiting) if is_spoilt else contextlib.nullcontext()
            with spoilt, routed.execute(made, counts_MLGE, [shard]), routed.replay(shard):
                assert there.waits() == around_layers + is_spoilt, there.device.reads
