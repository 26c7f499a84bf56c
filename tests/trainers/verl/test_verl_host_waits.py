"""Passes of verl on a device that counts the waits of the host."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from foreroute.errors import CaptureError
from foreroute.testing.counting_device import DEVICE
from foreroute.testing.models import tiny
from foreroute.trainers.verl import fsdp
from tests.trainers.verl.verl_ranks import run
from tests.trainers.verl.waits import EACH, WIDTH, There, counting, require_no_wait, waits_of_updates


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
    require_no_wait(*run(1, "megatron_waits.count"))
