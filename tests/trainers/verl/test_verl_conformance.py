"""The kit on our verl adapter: passes of verl's FSDP engine over batches in verl's layouts.

The engine is verl's from `forward_step` on. It is given the kit's model instead of building one, which FSDP does not
wrap, since the kit reads whole gradients. Batches that the kit pads on the right keep their padding, as with
`use_remove_padding=False`; all others are packed.
"""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from foreroute.conformance import conformance_tests
from foreroute.conformance.adapter import Seen, Unsupported
from foreroute.conformance.huggingface import HuggingFaceModel, HuggingFaceUnderTest
from foreroute.conformance.torch_model import TorchStep
from foreroute.errors import CaptureError
from foreroute.testing.models import FAMILIES
from foreroute.trainers.verl import FIELD, routed_experts
from foreroute.trainers.verl.fsdp import FSDPPasses, FSDPRoutingReplay
from tests.trainers.verl.verl_batches import nested, unpadded

pytestmark = pytest.mark.usefixtures("group")


class VerlUnderTest(HuggingFaceUnderTest):
    adapter = "foreroute.trainers.verl"

    def build(self, case):
        if case.top_k == 1:
            raise Unsupported("verl writes an absent row as zeros, which with top-1 may be expert 0; such are refused")
        if case.selective or case.compiled:
            raise Unsupported("verl switches on neither selective checkpoints nor compiled layers")
        model = super().build(replace(case, checkpointing=False)).model
        if case.checkpointing:
            model.train()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return VerlModel(model)

    def indexers(self):
        """None: a batch of verl has no field for what they chose."""

    def attach(self, model):
        model.attached = AttachedEngine(model.engine)
        return model.attached


class Engine(FSDPRoutingReplay, FSDPEngineWithLMHead):
    """The engine of verl with ours around a model that is there."""

    def __init__(self, module):
        self.module = module
        self.model_config = SimpleNamespace(external_lib=None)
        self.engine_config = SimpleNamespace(forward_only=False, entropy_checkpointing=False)
        self.ulysses_device_mesh, self.use_ulysses_sp, self.pad_to_length = None, False, False
        self.ulysses_parallel_group, self.ulysses_sequence_parallel_size = None, 1
        self._autocast_dtype = torch.float32


class AttachedEngine:
    """What an engine replays, opened by hand."""

    def __init__(self, engine):
        self.passes, self.rollout = FSDPPasses(engine, "R3"), None
        self.passes.first_rollout_checked = True  # the kit replays routes that no model would take
        self.spec, self.record = self.passes.routed.spec, self.passes.routed.record  # which R2 is recorded with

    @contextmanager
    def replay(self, trace, *, weight_version=None):
        """The trace as the rollout of one batch."""
        if weight_version is not None:
            raise Unsupported("routes of any weights are replayed, as asynchronous rollouts bring them")
        self.spec.require_same(trace.spec, what="the trace")
        outer, self.rollout = self.rollout, trace
        try:
            with self.passes.batch({FIELD: trace}, update=True):
                yield
        finally:
            self.rollout = outer


class VerlModel(HuggingFaceModel):
    def __init__(self, model):
        super().__init__(model)
        self.engine, self.attached = Engine(model), None

    def forward(self, batch, *, grad=True):
        """One pass of verl over a micro-batch."""
        rollout, found = None if self.attached is None else self.attached.rollout, []
        self.engine.routing = None if rollout is None else self.attached.passes

        def minus_mean_log_prob(model_output, data, dp_group):
            found.append(torch.cat([row[:-1] for row in model_output["log_probs"].unbind()]))
            return -found[0].mean(), {}

        with torch.set_grad_enabled(grad), self._probed() as given, collapse_is_refused():
            loss, _ = self.engine.forward_step(micro_batch(batch, rollout), minus_mean_log_prob, not grad)
        real = np.ones(batch.lengths.sum(), np.bool_)
        if batch.padding == "right":  # which verl keeps
            real = (np.arange(batch.lengths.max()) < batch.lengths[:, None]).reshape(-1)
        ids, gates = (np.stack([given[path][part] for path in self._experts], axis=1) for part in (0, 1))
        seen = Seen(
            ids[real],
            found[0].detach().numpy(),
            float(loss.detach()),
            gates[real],
            ids[~real] if not real.all() else None,
            {path: given[path][0] for path in given if path not in self._experts},
        )
        return TorchStep(seen, loss)


@contextmanager
def collapse_is_refused():
    """Routes of one check send every token to the same experts, which this adapter takes for a failed capture."""
    try:
        yield
    except CaptureError as error:
        if "the capture of that layer failed" not in str(error):
            raise
        raise Unsupported(f"refused as a failed capture: {error}") from error


def micro_batch(batch, rollout):
    """The sequences without padding, the first token of each as prompt, and their routes."""
    fields = unpadded([np.split(tokens.astype(np.int64), [1]) for tokens in batch.sequences])
    fields["position_ids"] = nested([np.arange(len(tokens)) for tokens in batch.sequences])
    routes = {} if rollout is None else {FIELD: routed_experts(rollout, fields)}
    del fields[FIELD]
    data = TensorDict(fields | routes, batch_size=len(batch.sequences))
    tu.assign_non_tensor(data, temperature=1.0, use_remove_padding=batch.padding != "right")
    return data


test_conformance = conformance_tests(VerlUnderTest("qwen3_moe", FAMILIES["qwen3_moe"]))
