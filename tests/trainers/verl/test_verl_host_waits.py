"""Passes of verl on a device that counts the waits of the host, in engines that do what verl's do with a micro-batch.

The device cannot hold nested tensors: engines are stand-ins, and jagged tensors are two plain ones.
"""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from verl.workers.engine.fsdp import transformer_impl

from foreroute.core.deferred_checks import DeferredChecks
from foreroute.errors import CaptureError
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.testing.models import tiny
from foreroute.trainers import weights_check
from foreroute.trainers.verl import fsdp, passes
from foreroute.trainers.verl.settings import MASKS
from tests.replay.session_subject import Batch, foreign
from tests.trainers.verl.verl_book import field_of
from tests.trainers.verl.verl_ranks import run

MICRO_BATCHES, EACH, WIDTH = 4, 3, 12


class Jagged(torch.Tensor):
    """What the passes ask a nested tensor for."""

    is_nested = property(lambda self: True)
    ndim = property(lambda self: self.parts[0].ndim + 1)

    @staticmethod
    def __new__(cls, values, offsets):
        made = torch.Tensor._make_subclass(cls, torch.empty(len(offsets) - 1, dtype=values.dtype))
        made.parts = values, offsets
        return made

    def values(self):
        return self.parts[0]

    def offsets(self):
        return self.parts[1]

    def unbind(self):
        return self.parts[0].tensor_split(self.parts[1][1:-1].cpu())


class MicroBatch(dict):
    """In the place of a TensorDict."""

    def select(self, *names):
        return MicroBatch({name: self[name] for name in names})

    def exclude(self, *names):
        return self.select(*(name for name in self if name not in names))

    def to(self, device):
        moved = {name: each.parts if isinstance(each, Jagged) else (each,) for name, each in self.items()}
        moved = {name: [part.to(device) for part in parts] for name, parts in moved.items()}
        return MicroBatch({name: Jagged(*parts) if len(parts) == 2 else parts[0] for name, parts in moved.items()})


def micro_batch(spec, vocabulary, seed):
    ids = torch.randint(1, vocabulary, (EACH, WIDTH), generator=torch.Generator().manual_seed(seed))
    offsets = torch.arange(0, EACH * WIDTH + 1, WIDTH)
    routes = torch.from_numpy(foreign(spec, Batch(ids, (WIDTH,) * EACH), seed).expert_ids_NLK.astype("int16"))
    responses = ids[:, 5:].clone()
    return MicroBatch(
        input_ids=Jagged(ids.reshape(-1), offsets),
        routed_experts=Jagged(routes, offsets),
        attention_mask=torch.ones_like(ids),
        responses=responses,
        response_mask=torch.ones_like(responses),
        rollout_log_probs=torch.full(responses.shape, -4.0),
    )


@contextmanager
def counting(engine):
    """The device, while the module of an engine of ours takes it for that of its process."""
    with (
        other_device() as device,
        mock.patch.object(engine, "get_device_id", return_value=DEVICE),
        mock.patch.object(passes, "gather_over", lambda group, mine: [mine]),
        mock.patch.object(passes, "add_over", lambda groups, sums: sums),
        mock.patch.object(weights_check, "K3_LIMIT", 10),  # log-probs of the rollout are made up
    ):
        yield device


class There:
    """An engine on the device, with passes of ours; derived ones have `run(forward_only)`, for waits, and `logits`."""

    def __init__(self, device, passes, vocabulary):
        self.device, self.passes = device, passes
        passes.first_rollout_checked = True
        self.micro_batches = [micro_batch(passes.routed.spec, vocabulary, seed) for seed in range(MICRO_BATCHES)]

    def scored(self, there):
        """Loss and output of a micro-batch, as verl's engines make them."""
        ids_N = there["input_ids"].values()
        log_probs = self.logits(ids_N).log_softmax(-1).gather(-1, ids_N.roll(-1)[:, None])[:, 0]
        loss = -log_probs.mean()
        output = {"log_probs": Jagged(log_probs.detach(), there["input_ids"].offsets())}
        return loss, {"model_output": output, "loss": loss.detach().item(), "metrics": {}}

    def old_log_probs(self):
        with torch.no_grad(), self.passes.batch(self.micro_batches[0], update=False):
            return self.run(forward_only=True)

    def update(self):
        with self.passes.batch(self.micro_batches[0], update=True):
            return self.run(forward_only=False)

    def logged(self):
        logs = {"metrics": {}}
        self.passes.log(logs)
        return {name: value for name, (value,) in logs["metrics"].items()}


def waits_of_updates(there, plain):
    """Waits of an update without replay, with it, and where what is asked is read at once; and what is logged."""
    there.old_log_probs()
    waits = {"plain": plain(), "replayed": there.update(), "logged": there.logged()}
    with mock.patch.object(DeferredChecks, "add", lambda self, wrong, raise_error: wrong.item()):
        return waits | {"read at once": there.update()}


def require_no_wait(waits):
    assert waits["replayed"] == waits["plain"]  # which sends each field to the device once, and reads each loss
    assert waits["read at once"] >= waits["plain"] + MICRO_BATCHES  # the control
    assert waits["logged"]["mismatch/disagreement"] == 0.0
    assert waits["logged"]["mismatch/native_disagreement"] > 0.05


class Engine(There):
    def __init__(self, device, replay):
        self.model = tiny("qwen3_moe", experts="batched_mm").to(DEVICE)
        engine = SimpleNamespace(module=self.model, ulysses_parallel_group=None, get_data_parallel_group=lambda: None)
        super().__init__(device, fsdp.FSDPPasses(engine, replay), self.model.config.vocab_size)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self._positions = torch.arange(WIDTH).repeat(EACH)[None].to(DEVICE)
        self.run(step=self.forward_step)  # what the model keeps is made

    def logits(self, ids_N):
        return self.model(input_ids=ids_N[None], position_ids=self._positions, use_cache=False).logits[0]

    def forward_step(self, micro_batch, *_):
        return self.scored(micro_batch.to(DEVICE))

    def run(self, *, forward_only=False, step=None):
        """Replayed, or, given one, by a step of the engine itself."""
        step = step or partial(self.passes.step, self.forward_step, loss_function=None)
        self.device.reads.clear()
        for each in self.micro_batches:
            loss, _ = step(each)
            if not forward_only:
                loss.backward()
        return sum(self.device.reads.values())


@pytest.fixture
def there(request):
    with counting(fsdp) as device:
        yield Engine(device, getattr(request, "param", "R3"))


def test_an_update_waits_for_what_verl_waits_for(there):
    require_no_wait(waits_of_updates(there, plain=partial(there.run, step=there.forward_step)))


@pytest.mark.parametrize(("there", "reads"), [("R3", 2), ("disabled", 0)], indirect=["there"])
def test_an_old_pass_copies_no_routes_to_the_host(there, reads):
    if not reads:  # what is not replayed may be missing where tokens are trained
        there.micro_batches[0]["routed_experts"].values()[WIDTH - 2 : WIDTH] = 0
    there.old_log_probs()
    # behind its last forward replay reads what judges rows, and weights; without it all is read where it is logged
    assert there.device.reads["to the host"] == reads, there.device.reads
    assert (there.logged()["mismatch/disagreement"] == 0.0) == bool(reads)


@pytest.mark.parametrize(
    ("expert", "message"), [(1, r"expert twice"), (99, "expected 0 to"), (0, r"no route.*position")]
)
def test_what_is_wrong_in_an_update_is_told_before_the_optimizer_steps(expert, message, there):
    there.old_log_probs()
    there.micro_batches[2]["routed_experts"].values()[2] = expert
    there.update()
    with pytest.raises(CaptureError, match=message):
        there.optimizer.step()


def test_an_update_on_megatron_waits_for_what_verl_waits_for():
    pytest.importorskip("mbridge", reason="there is no mbridge in this environment: run `make night PART=verl`")
    require_no_wait(*run(1, "megatron_waits.count"))


def test_the_host_waits_for_no_label_and_no_set(monkeypatch):
    """verl's engine is a stand-in that scores as it does: the device that counts waits cannot hold nested tensors."""
    tokens, vocabulary = torch.tensor([[3, 1, 7, 1, 5], [9, 2, 6, 5, 3]]), 11
    sets = [[[1, 7], [], [5]], [list(range(vocabulary)), [5, 0, 2], [3, 4]]]
    batch = MicroBatch(
        input_ids=Jagged(tokens.reshape(-1), torch.arange(0, 11, 5)),
        attention_mask=torch.ones_like(tokens),
        responses=tokens[:, 2:],
        response_mask=torch.tensor([[1, 0, 1], [1, 1, 1]]),
    )
    logits = torch.randn((10, vocabulary), generator=torch.Generator().manual_seed(0))

    def forward_step(self, micro_batch, loss_function, forward_only):
        there, given = micro_batch.exclude("sampling_mask").to(DEVICE), logits.to(DEVICE)
        device.reads.clear()
        labels = there["input_ids"].values().roll(-1)
        return transformer_impl.logprobs_from_logits(logits=given, labels=labels, inplace_backward=True)

    monkeypatch.setattr(transformer_impl.FSDPEngineWithLMHead, "forward_step", forward_step)
    engine = object.__new__(fsdp.RoutingReplayEngine)
    engine.ulysses_parallel_group, engine.model_config = None, SimpleNamespace(external_lib=MASKS)
    with other_device() as device:
        found = engine.forward_step(MicroBatch(batch, sampling_mask=[field_of(each) for each in sets]), None, False)
        assert not device.reads, device.reads
        found = found.cpu()
    expected = torch.zeros(10)
    for s, own in enumerate(sets):
        for row, ids in enumerate(own, start=5 * s + 1):
            if ids:
                expected[row] = logits[row, ids].log_softmax(-1)[ids.index(int(tokens.reshape(-1)[row + 1]))]
    torch.testing.assert_close(found, expected)
