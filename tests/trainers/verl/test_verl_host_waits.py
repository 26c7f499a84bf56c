"""Passes of verl on a device that counts the waits of the host, which cannot hold nested tensors.

So the engines here are stand-ins that do what verl's do with a micro-batch, and jagged tensors are two plain ones.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from foreroute.core.deferred_checks import DeferredChecks
from foreroute.errors import CaptureError
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.testing.models import tiny
from foreroute.trainers import weights_check
from foreroute.trainers.verl import fsdp, passes
from tests.trainers.verl.jagged_there import Jagged, MicroBatch
from tests.trainers.verl.verl_batches import padded, sequences
from tests.trainers.verl.verl_ranks import run

MICRO_BATCHES, EACH = 4, 2


def micro_batches(num_layers, num_experts):

    def routes(tokens):
        first = (7 * tokens[:-1, None] + np.arange(num_layers)) % num_experts
        return np.stack([first, (first + 1) % num_experts], axis=-1)

    pairs = [(prompt % 19 + 1, response % 19 + 1) for prompt, response in sequences(MICRO_BATCHES * EACH)]
    batch = padded(pairs, routes, layers=num_layers)
    kept = batch["attention_mask"].bool()
    found = []
    for first in range(0, len(pairs), EACH):
        rows = slice(first, first + EACH)
        offsets = torch.nn.functional.pad(kept[rows].sum(1).cumsum(0), (1, 0))
        each = {name: batch[name][rows] for name in ("attention_mask", "responses", "response_mask")}
        for name in ("input_ids", "position_ids", "routed_experts"):
            each[name] = Jagged(batch[name][rows][kept[rows]], offsets)
        each["rollout_log_probs"] = torch.full(each["responses"].shape, -4.0)
        found.append(MicroBatch(each))
    return found


class There:
    """An engine on the device.

    Attributes:
        device: with its count of waits.
        micro_batches: of one batch.
    """

    def __init__(self, device, replay):
        self.device, self.model = device, tiny("qwen3_moe", experts="batched_mm").to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        engine = SimpleNamespace(module=self.model, ulysses_parallel_group=None, get_data_parallel_group=lambda: None)
        self.passes = fsdp.FSDPPasses(engine, replay)
        self.passes.first_rollout_checked = True
        spec = self.passes.routed.spec
        self.micro_batches = micro_batches(spec.num_layers, spec.num_experts)
        self.plain()  # what the model keeps is made

    def forward_step(self, micro_batch, loss_function, forward_only):
        there = micro_batch.to(DEVICE)
        ids, positions = there["input_ids"], there["position_ids"]
        logits = self.model(input_ids=ids.values()[None], position_ids=positions.values()[None], use_cache=False).logits
        log_probs = logits[0].log_softmax(-1).gather(-1, ids.values().roll(-1)[:, None])[:, 0]
        loss = -log_probs.mean()
        output = {"model_output": {"log_probs": Jagged(log_probs.detach(), ids.offsets())}}
        return loss, output | {"loss": loss.detach().item(), "metrics": {}}

    def plain(self):
        """The waits of an update without replay."""
        self.device.reads.clear()
        for each in self.micro_batches:
            self.forward_step(each, None, False)[0].backward()
        return sum(self.device.reads.values())

    def old_log_probs(self):
        self.device.reads.clear()
        with torch.no_grad(), self.passes.batch(self.micro_batches[0], update=False):
            for each in self.micro_batches:
                self.passes.step(self.forward_step, each, None)

    def update(self):
        """The waits of an update, up to the step of the optimizer."""
        self.device.reads.clear()
        with self.passes.batch(self.micro_batches[0], update=True):
            for each in self.micro_batches:
                self.passes.step(self.forward_step, each, None)[0].backward()
        return sum(self.device.reads.values())


@pytest.fixture
def there(monkeypatch, request):
    monkeypatch.setattr(fsdp, "get_device_id", lambda: DEVICE)
    monkeypatch.setattr(passes, "gather_over", lambda group, mine: [mine])
    monkeypatch.setattr(passes, "add_over", lambda groups, sums: sums)
    monkeypatch.setattr(weights_check, "K3_LIMIT", 10)  # the rollout's are made up
    with other_device() as device:
        yield There(device, getattr(request, "param", "R3"))


def test_an_update_waits_for_what_verl_waits_for(there, monkeypatch):
    there.old_log_probs()
    unpatched = there.plain()
    assert there.update() == unpatched  # which sends each field to the device once, and reads each loss
    there.optimizer.step()
    logs = {"metrics": {}}
    there.passes.log(logs)
    assert logs["metrics"]["mismatch/disagreement"] == [0.0]
    assert logs["metrics"]["mismatch/native_disagreement"][0] > 0.05
    # the control: what is asked is read at once
    monkeypatch.setattr(DeferredChecks, "add", lambda self, wrong, raise_error: wrong.item())
    assert there.update() >= unpatched + MICRO_BATCHES


@pytest.mark.parametrize(("there", "reads"), [("R3", 2), ("disabled", 0)], indirect=["there"])
def test_an_old_pass_copies_no_routes_to_the_host(there, reads):
    if not reads:  # what is not replayed may be missing where tokens are trained
        routes = there.micro_batches[0]["routed_experts"]
        routes.values()[routes.offsets()[1] - 2] = 0
    there.old_log_probs()
    # behind its last forward replay reads what judges rows, and weights; without it all is read where it is logged
    assert there.device.reads["to the host"] == reads, there.device.reads
    logs = {"metrics": {}}
    there.passes.log(logs)
    assert (logs["metrics"]["mismatch/disagreement"] == [0.0]) == bool(reads)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda routes: routes[2].fill_(1), "an expert twice"),
        (lambda routes: routes[2].fill_(99), "expected 0 to"),
        (lambda routes: routes[2].fill_(0), "no route at position"),
    ],
)
def test_what_is_wrong_in_an_update_is_told_before_the_optimizer_steps(spoil, message, there):
    there.old_log_probs()
    spoil(there.micro_batches[2]["routed_experts"].values())
    there.update()
    with pytest.raises(CaptureError, match=message):
        there.optimizer.step()


def test_an_update_on_megatron_waits_for_what_verl_waits_for():
    pytest.importorskip("mbridge", reason="there is no mbridge in this environment: run `make night PART=verl`")
    [waits] = run(1, "megatron_waits.count")
    assert waits["replayed"] == waits["plain"]
    assert waits["read at once"] >= waits["plain"] + MICRO_BATCHES  # the control
    assert waits["disagreement"] == [0.0]
    assert "sends 36 rows, from there on, of" in waits["refused"]  # of one layer that was never captured
    assert "another micro-batch than those" in waits["others"]
