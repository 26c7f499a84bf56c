"""What counts the waits of the host in verl's passes: an engine on the device that counts, and batches for it.

The device cannot hold nested tensors. So the engines are stand-ins that do what verl's do with a micro-batch, and
jagged tensors are two plain ones.
"""

from contextlib import contextmanager
from unittest import mock

import torch

from foreroute.core.deferred_checks import DeferredChecks
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.trainers import weights_check
from foreroute.trainers.verl import passes
from tests.replay.session_subject import Batch, foreign

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
    """An engine on the device, with passes of ours. Kinds have `run(forward_only)`, which gives waits, and `logits`."""

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
