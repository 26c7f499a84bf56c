"""Counts the waits of the host in updates of verl's Megatron passes, on a schedule without a pipeline."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

# isort: off
from tests.trainers.verl import megatron_engines  # noqa: F401  before verl: no GPU

# isort: on
import pytest
import torch

from foreroute.errors import CaptureError, ReplayError
from foreroute.testing.counting_device import DEVICE
from foreroute.trainers.verl import megatron
from foreroute.trainers.verl.megatron import MegatronPasses, transformer_impl
from tests.adapters.megatron.model_chunks import VOCABULARY
from tests.adapters.megatron.one_rank import model as one_rank_model
from tests.trainers.verl.test_verl_host_waits import EACH, WIDTH, There, counting, waits_of_updates


def count():
    built = one_rank_model(layers=3, moe_layer_freq=[0, 1, 1])
    config = SimpleNamespace(use_remove_padding=False, pad_bshd_to_minibatch_max=False)
    engine = SimpleNamespace(module=[built], engine_config=config, get_data_parallel_group=lambda: None)
    passes, changed, left = MegatronPasses(engine, "R3"), {}, []
    schedule = lambda **given: one_after_the_other(**given | changed)  # noqa: E731

    @contextmanager
    def executing(shards, stage, **options):
        """Ranks that execute a plan tell one another at its end what they did; an error ends it on a rank alone."""
        yield None
        left.append("with others")

    with (
        counting(megatron) as device,
        mock.patch.object(torch.cuda, "current_device", return_value=DEVICE),
        mock.patch.object(transformer_impl, "get_forward_backward_func", return_value=schedule),
    ):
        there = Engine(device, passes, built.to(DEVICE))
        there.run(forward_only=False)  # what Megatron keeps is made
        waits = waits_of_updates(there, plain=lambda: there.run(forward_only=False))
        changed["data_iterator"] = iter(there.micro_batches)
        with pytest.raises(ReplayError, match=r"another micro-batch.*split"):
            there.update()
        del changed["data_iterator"]
        planned = mock.patch.object(passes, "_planned", SimpleNamespace(executing=executing))
        changed["num_microbatches"] = 3
        with planned, pytest.raises(ReplayError, match="ran 3 forwards of 4 micro-batches"):
            there.update()
        assert left == ["with others"], "this rank kept the others waiting"
        changed.clear()
        there.micro_batches[1]["routed_experts"].values()[:, 1] = torch.tensor([0, 1])  # a layer never captured
        with pytest.raises(CaptureError, match="sends 36 rows"):
            there.old_log_probs()
    return waits


class Engine(There):
    def __init__(self, device, passes, model):
        super().__init__(device, passes, VOCABULARY)
        self.model = model
        positions, causal = torch.arange(WIDTH).expand(EACH, -1), torch.ones(WIDTH, WIDTH, dtype=torch.bool)
        self._given = [each.to(DEVICE) for each in (positions, causal.triu(1)[None, None])]

    def logits(self, ids_N):
        return self.model(ids_N.view(EACH, -1), *self._given).float().view(EACH * WIDTH, -1)

    def run(self, *, forward_only):
        """From the first forward on, before which all routes are read."""
        self._is_first = True
        transformer_impl.get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=iter(self.micro_batches),
            model=[self.model],
            num_microbatches=len(self.micro_batches),
            forward_only=forward_only,
        )
        return sum(self.device.reads.values())

    def forward_step(self, batches, model):
        if self._is_first:
            self.device.reads.clear()
            self._is_first = False
        loss, result = self.scored(next(batches).select("input_ids", "responses").to(DEVICE))
        return loss, lambda loss: (loss, result)


def one_after_the_other(*, forward_step_func, data_iterator, model, num_microbatches, forward_only):
    """Megatron's schedule without a pipeline."""
    results = []
    for _ in range(num_microbatches):
        output, finish = forward_step_func(data_iterator, model[0])
        loss, result = finish(output)
        results.append(result)
        if not forward_only:
            loss.backward()
    return results
