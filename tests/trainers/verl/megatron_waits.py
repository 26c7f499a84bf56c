"""Counts the waits of the host in updates of verl's Megatron passes, whose engine and schedule are stand-ins."""

from types import SimpleNamespace
from unittest import mock

# isort: off
from tests.trainers.verl import megatron_engines  # noqa: F401  before verl: no GPU

# isort: on
import torch

from foreroute.core.deferred_checks import DeferredChecks
from foreroute.errors import CaptureError, ReplayError
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.trainers import weights_check
from foreroute.trainers.verl import megatron, passes
from foreroute.trainers.verl.megatron import MegatronPasses, transformer_impl
from tests.adapters.megatron.model_chunks import VOCABULARY
from tests.adapters.megatron.one_rank import model as one_rank_model
from tests.replay.session_subject import Batch, foreign
from tests.trainers.verl.jagged_there import Jagged, MicroBatch

MICRO_BATCHES, EACH, WIDTH = 4, 3, 12
OFFSETS = torch.arange(0, EACH * WIDTH + 1, WIDTH)


def count():
    built = one_rank_model(layers=3, moe_layer_freq=[0, 1, 1])
    config = SimpleNamespace(use_remove_padding=False, pad_bshd_to_minibatch_max=False)
    engine = SimpleNamespace(module=[built], engine_config=config, get_data_parallel_group=lambda: None)
    routing = MegatronPasses(engine, "R3")
    routing.first_rollout_checked = True
    batch = [micro_batch(routing.routed.spec, seed) for seed in range(MICRO_BATCHES)]
    waits = {}
    with (
        other_device() as device,
        mock.patch.object(torch.cuda, "current_device", return_value=DEVICE),
        mock.patch.object(megatron, "get_device_id", return_value=DEVICE),
        mock.patch.object(passes, "gather_over", lambda group, mine: [mine]),
        mock.patch.object(passes, "add_over", lambda groups, sums: sums),
        mock.patch.object(weights_check, "K3_LIMIT", 10),
        mock.patch.object(transformer_impl, "get_forward_backward_func", return_value=one_after_the_other),
    ):
        built.to(DEVICE)
        there = Engine(device, built, batch)
        there.run(forward_only=False)  # what Megatron keeps is made
        waits["plain"] = there.run(forward_only=False)
        with torch.no_grad(), routing.batch(batch[0], update=False):
            there.run(forward_only=True)
        with routing.batch(batch[0], update=True):
            waits["replayed"] = there.run(forward_only=False)
        logs = {"metrics": {}}
        routing.log(logs)
        waits["disagreement"] = logs["metrics"]["mismatch/disagreement"]
        read = lambda self, wrong, raise_error: wrong.item()  # noqa: E731
        with mock.patch.object(DeferredChecks, "add", read), routing.batch(batch[0], update=True):
            waits["read at once"] = there.run(forward_only=False)
        others = lambda **given: one_after_the_other(**given | {"data_iterator": iter(batch)})  # noqa: E731
        with mock.patch.object(transformer_impl, "get_forward_backward_func", return_value=others):
            try:
                with routing.batch(batch[0], update=True):
                    there.run(forward_only=False)
            except ReplayError as error:
                waits["others"] = str(error)
        batch[1]["routed_experts"].values()[:, 1] = torch.tensor([0, 1])
        try:
            with torch.no_grad(), routing.batch(batch[0], update=False):
                there.run(forward_only=True)
        except CaptureError as error:
            waits["refused"] = str(error)
    return waits


def micro_batch(spec, seed):
    ids = torch.randint(1, VOCABULARY, (EACH, WIDTH), generator=torch.Generator().manual_seed(seed))
    routes = torch.from_numpy(foreign(spec, Batch(ids, (WIDTH,) * EACH), seed).expert_ids_NLK.astype("int16"))
    responses = ids[:, 5:].clone()
    return MicroBatch(
        input_ids=Jagged(ids.reshape(-1), OFFSETS),
        routed_experts=Jagged(routes, OFFSETS),
        attention_mask=torch.ones_like(ids),
        responses=responses,
        response_mask=torch.ones_like(responses),
        rollout_log_probs=torch.full(responses.shape, -4.0),
    )


class Engine:
    """What verl's does with a batch.

    Attributes:
        device: with its count of waits.
    """

    def __init__(self, device, built, batch):
        self.device, self._model, self._batch = device, built, batch
        positions, causal = torch.arange(WIDTH).expand(EACH, -1), torch.ones(WIDTH, WIDTH, dtype=torch.bool)
        self._given = [each.to(DEVICE) for each in (positions, causal.triu(1)[None, None])]

    def run(self, *, forward_only):
        """Waits from the first forward on."""
        schedule = transformer_impl.get_forward_backward_func()
        self._is_first = True
        schedule(
            forward_step_func=self.forward_step,
            data_iterator=iter(self._batch),
            model=[self._model],
            num_microbatches=len(self._batch),
            forward_only=forward_only,
        )
        return sum(self.device.reads.values())

    def forward_step(self, batches, model):
        if self._is_first:
            self.device.reads.clear()
            self._is_first = False
        batch = next(batches)
        batch = batch.select("input_ids", "responses").to(DEVICE)
        ids = batch["input_ids"]
        logits = model(ids.values().view(EACH, -1), *self._given)
        log_probs = logits.float().log_softmax(-1).view(EACH * WIDTH, -1)
        log_probs = log_probs.gather(-1, ids.values().roll(-1)[:, None])[:, 0]

        def finish(output):
            loss = -output.mean()
            return loss, {
                "loss": loss.detach().item(),
                "model_output": {"log_probs": Jagged(output.detach(), ids.offsets())},
            }

        return log_probs, finish


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
