"""Expert-parallel steps on the device, in processes of their own: on one rank, and on two ranks that share it.

NCCL refuses two ranks on one card (before 2.30), so gloo carries their rows and gradients too, through the host.
"""

import copy
import os
import sys
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from benchmarks.gpu.counting import place, waits_are_seen, waits_on_cuda
from benchmarks.harness.host_path import HostPath
from benchmarks.harness.models import spread_model
from benchmarks.harness.spread_bench import SIZES, HFBench, drawn
from foreroute.adapters import hf
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.testing.ranks import Workers
from tests.adapters.hf.model_runs import whole
from tests.ep.transfer.plans import split_plan
from tests.gpu import bits

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
RANKS, MICRO_STEPS = 2, 2
TIMEOUT_S = 90
"""Of what goes on between ranks."""
CLOSE = 1e-4
"""Of the largest value: sums of float32 in another order."""
MULTI_RANK_NCCL = (2, 30)
"""The first that lets two ranks share a card, where the environment asks for it."""
ONE = "cpu:gloo,cuda:nccl"
DATA_PATH = tuple(f"foreroute/ep/{name}" for name in ("layer.py", "compute.py", "transfer/"))
"""What runs between the rows of a step. The beginnings of steps and micro-steps, where ranks agree, are elsewhere."""


def launch_waits(work):
    """List waits of `waits_on_cuda`, and explicit ones for a stream or an event, on the data path of a layer."""
    explicit = []
    with ExitStack() as stack:
        for waiting in (torch.cuda.Stream, torch.cuda.Event):

            def noting(waited, wait=waiting.synchronize):
                caller = sys._getframe(1)
                explicit.append(place(caller.f_code.co_filename, caller.f_lineno))
                wait(waited)

            stack.enter_context(patch.object(waiting, "synchronize", noting))
        found = waits_on_cuda(work)
    return [each for each in dict.fromkeys(found + explicit) if each.startswith(DATA_PATH)]


def workers(num_ranks, device, backend="gloo"):
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # there may be no other
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if device.type == "cuda":
        return Workers(num_ranks, timeout_s=TIMEOUT_S, backend=backend, forked_from=None)
    return Workers(num_ranks, timeout_s=300)


@pytest.fixture(scope="module")
def one(device):
    """A world of one rank, on NCCL beside gloo for a GPU: `one(function, ...)` calls it there with the device."""
    with closing(workers(1, device, ONE if device.type == "cuda" else "gloo")) as started:
        yield lambda function, *args: started.run(on_device, function, device, *args)[0]


def on_device(rank, function, device, *args):
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return function(device, *args)


def check_fsdp(device):
    """FSDP2, attached before and after: what the model alone makes of the same routes."""
    case = bits.Case.of("qwen3_moe", device, torch.float32)
    model = copy.deepcopy(case.untouched)
    before = hf.attach(model)
    for module in (*model.model.layers, model):
        fully_shard(module)
    with case.routed.replay(case.foreign):
        expected = bits.step(case.routed.model, case.batch)
    for routed in (before, hf.attach(model)):
        with routed.replay(case.foreign), routed.record() as recording:
            seen = bits.step(model, case.batch)
        assert recording.trace().equals(case.foreign)
        assert torch.equal(seen["logits"], expected["logits"])
        assert all(bits.distance(seen[name], gradient) < CLOSE for name, gradient in expected.items())
    assert not torch.equal(bits.logits_of(model, case.batch), expected["logits"]), "the control"


def check_copies(device):
    """A burst fills its slots with the experts that were asked for, and no others, from page-locked memory."""
    with HostPath.opened(device) as path:
        for name, tensor in path.memory.expert(0, path.num_experts - 1).items():
            assert device.type == "cpu" or tensor.is_pinned(), name
        for size in path.bursts:
            for slots in path.slots.values():
                slots.zero_()
            path.copy(size)
            for name, slots in path.slots.items():
                wanted = torch.zeros_like(slots)
                wanted[:size] = path.home[name][:size].flip(0)
                wrong = (slots != wanted).flatten(1).any(1).nonzero().flatten().tolist()
                assert not wrong, f"a burst of {size} experts: slots {wrong} of {name} hold other bytes"


def bench_on(device, dtype=torch.float32):
    """The model of a rank, spread, and its routes."""
    model = spread_model(SIZES, device=device, dtype=dtype)
    return HFBench.drawn(model, hf.attach(model), micro_steps=MICRO_STEPS, shape=shape_on(device))


def shape_on(device):
    return (4, 64) if device.type == "cuda" else (2, 12)


def alone(num_ranks, device, dtype=torch.float32):
    """The step of so many ranks by one process and the plain model: logits, and gradients by name."""
    model = hf.build_model("qwen3_moe", seed=0, experts_implementation="eager", **SIZES.of_hf()).to(device, dtype)
    routed = hf.attach(model)
    logits = []
    for rank in range(num_ranks):
        batches, traces = drawn(routed.spec, rank=rank, micro_steps=MICRO_STEPS, shape=shape_on(device))
        for batch, trace in zip(batches, traces, strict=True):
            with routed.replay(trace):
                logits.append(forward_and_backward(model, batch))
    return logits, {name: parameter.grad.cpu() / num_ranks for name, parameter in model.named_parameters()}


def forward_and_backward(model, batch):
    logits = model(input_ids=batch.to(model.device), use_cache=False).logits
    logits.float().log_softmax(-1)[..., 0].sum().backward()
    return logits.detach().cpu()


def step_under(bench, step, transfers=None):
    """A step under a plan with replicas: logits of this rank, and the mean of the gradients of all ranks."""
    model, logits = bench.model, []
    plan = split_plan(step, bench.counts_MLGE, bench.routed.home_LE)
    with bench.routed.execute(plan, bench.counts_MLGE, bench.routes_M, step=step) as execution:
        for batch, rows in zip(bench.batches, bench.routes_M, strict=True):
            with bench.routed.replay(rows):
                logits.append(forward_and_backward(model, batch))
    if transfers is not None:
        transfers += execution.transfers
    grads = {name: whole(each.grad).cpu() for name, each in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return logits, grads


def distance(found, expected):
    """The largest difference of any tensor, over that tensor's largest value."""
    pairs = list(zip(found[0], expected[0], strict=True))
    pairs += [(found[1][name], grad) for name, grad in expected[1].items()]
    return max(
        float((seen.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-30))
        for seen, wanted in pairs
    )


def check_one_rank(device):
    """Under a plan it is the model alone; in bfloat16 it may be as far from float32 as twice that is."""
    exact = alone(1, device)
    assert distance(step_under(bench_on(device), 0), exact) < CLOSE
    own = distance(alone(1, device, torch.bfloat16), exact)
    assert distance(step_under(bench_on(device, torch.bfloat16), 0), exact) < 2 * own


@pytest.mark.parametrize("check", [check_fsdp, check_copies, check_one_rank])
def test_on_one_rank(one, check):
    one(check)


@pytest.mark.exhaustive  # on a CPU tests/ep/test_replicas.py has it by day
@pytest.mark.parametrize("backend", ["gloo", ONE])
def test_two_ranks_on_one_device_are_one_process(device, backend):
    """With replicas by host memory, and from peer to peer; on NCCL the host waits nowhere between the rows."""
    if backend != "gloo":
        if device.type == "cpu":
            pytest.skip("NCCL needs a GPU")
        version = torch.cuda.nccl.version()
        if version[:2] < MULTI_RANK_NCCL:
            pytest.skip(f"NCCL {version} refuses two ranks on one card, before {MULTI_RANK_NCCL}")
    with closing(workers(RANKS, device, backend)) as started:
        if any(started.run(is_refused, device)):
            pytest.skip("the card takes no second process")
        answers = {path: started.run(on_two_ranks, device, path, backend != "gloo") for path in ("host", "direct")}
    expected = alone(RANKS, device)
    for path, by_rank in answers.items():
        outcomes = [outcome for outcome, _, _ in by_rank]
        logits = [one for found, _ in outcomes for one in found]
        assert distance((logits, outcomes[0][1]), expected) < CLOSE
        for _, moved, places in by_rank:
            other = "direct" if path == "host" else "host"
            assert moved[path] > 0
            assert moved[other] == 0
            assert not places


def is_refused(rank, device):
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        return True
    return False


@contextmanager
def by_host():
    """Has gloo carry messages of a GPU, by copies in the host's memory."""
    post = PeerGroup.post

    def posting(peers, sends, receives, what):
        leaving = [(peer, number, tensor.cpu()) for peer, number, tensor in sends]
        arriving = [(peer, number, torch.empty_like(tensor, device="cpu")) for peer, number, tensor in receives]
        works = post(peers, leaving, arriving, what)

        def land():
            for (_, _, target), (_, _, buffer) in zip(receives, arriving, strict=True):
                target.copy_(buffer)

        works.append(SimpleNamespace(wait=land))  # behind the others
        return works

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeerGroup, "post", posting)
        patch.setattr(PeerGroup, "connect", lambda peers, device: None)
        yield


def on_two_ranks(rank, device, path, counts_waits):
    """A step whose replicas come by one path: its outcome, bytes that were fetched, and places of waits."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with nullcontext() if counts_waits else by_host():
        return step_on_two_ranks(rank, device, path, counts_waits)


def step_on_two_ranks(rank, device, path, counts_waits):
    bench, step = bench_on(device), 0
    bench.routed.use(TransferOptions(paths=path))
    transfers = []
    with closing(bench.routed):
        outcome = step_under(bench, step, transfers)
        fetched = [record for record in transfers if record.operation == "fetch"]
        places = launch_waits(partial(step_under, bench, step)) if counts_waits else []
    moved = {path: sum(getattr(record, f"{path}_bytes") for record in fetched) for path in ("host", "direct")}
    dist.barrier()
    return outcome, moved, places


def waits_of_a_step(device):
    if not waits_are_seen(device):
        return None
    return launch_waits(partial(step_under, bench_on(device, torch.bfloat16), 0))


def test_a_planned_step_waits_for_the_device_nowhere_between_its_rows(one):
    places = one(waits_of_a_step)
    if places is None:
        pytest.skip("no wait for a device is seen here; tests/ep/test_host_waits.py counts on a stand-in")
    assert places == []
