"""Our own verl adapter, as presented to the kit: passes of verl's FSDP engine over batches in verl's layouts.

The engine is verl's from `forward_step` on. It is given the kit's model instead of building one, which FSDP does not
wrap, since the kit reads whole gradients. Batches that the kit pads on the right keep their padding, as with
`use_remove_padding=False`; all others are packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from foreroute.conformance.adapter import Batch, Case, Seen, Unsupported
from foreroute.conformance.huggingface import HuggingFaceModel, HuggingFaceUnderTest
from foreroute.conformance.torch_model import TorchStep
from foreroute.errors import CaptureError
from foreroute.trace import RoutingSpec, RoutingTrace
from foreroute.trainers.verl import FIELD, routed_experts
from foreroute.trainers.verl.fsdp import FSDPPasses, FSDPRoutingReplay


class VerlUnderTest(HuggingFaceUnderTest):
    """A family of transformers as the policy of verl's FSDP engine."""

    adapter = "foreroute.trainers.verl"

    def build(self, case: Case) -> VerlModel:
        """The model of a family in an engine without replay."""
        if case.top_k == 1:
            raise Unsupported("verl writes an absent row as zeros, which with top-1 may be expert 0; such are refused")
        if case.selective or case.compiled:
            raise Unsupported("verl switches on neither selective checkpoints nor compiled layers")
        model = super().build(replace(case, checkpointing=False)).model
        if case.checkpointing:
            model.train()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return VerlModel(model)

    def indexers(self) -> None:
        """None: a batch of verl has no field for what they chose."""

    def attach(self, model: Any) -> AttachedEngine:  # type: ignore[override]
        """An engine with replay around the model."""
        model.attached = AttachedEngine(model.model)
        return model.attached  # type: ignore[no-any-return]


class BareEngine(FSDPEngineWithLMHead):
    """The engine of verl around a model that is there."""

    def __init__(self, module: Any) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        self.module = module
        self.engine_config = SimpleNamespace(forward_only=False, entropy_checkpointing=False)
        self.ulysses_device_mesh, self.use_ulysses_sp, self.pad_to_length = None, False, False
        self.ulysses_parallel_group, self.ulysses_sequence_parallel_size = None, 1
        self._autocast_dtype = torch.float32


class ReplayEngine(FSDPRoutingReplay, BareEngine):
    """The same with replay."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.controller = self.routing = FSDPPasses(self, "R3")
        self.controller.first_rollout_checked = True  # the kit replays routes that no model would take


class AttachedEngine:
    """What an engine replays, opened by hand."""

    def __init__(self, module: Any) -> None:
        self.engine = ReplayEngine(module)
        self.rollout: RoutingTrace | None = None

    @property
    def spec(self) -> RoutingSpec:
        """Experts, picks and layers of the policy."""
        spec: RoutingSpec = self.engine.controller.routed.spec
        return spec

    def record(self, **options: Any) -> AbstractContextManager[Any]:
        """What R2 is recorded with."""
        recording: AbstractContextManager[Any] = self.engine.controller.routed.record(**options)
        return recording

    @contextmanager
    def replay(self, trace: RoutingTrace, *, weight_version: int | None = None) -> Iterator[None]:
        """The trace as the rollout of one batch."""
        if weight_version is not None:
            raise Unsupported("routes of any weights are replayed, as asynchronous rollouts bring them")
        self.spec.require_same(trace.spec, what="the trace")
        outer, self.rollout = self.rollout, trace
        try:
            with self.engine.controller.batch({FIELD: trace}, update=True):
                yield
        finally:
            self.rollout = outer


class VerlModel(HuggingFaceModel):
    """A causal language model in an engine of verl.

    Attributes:
        attached: the engine with replay, once there is one.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._bare = BareEngine(model)
        self.attached: AttachedEngine | None = None

    def forward(self, batch: Batch, *, grad: bool = True) -> TorchStep:
        """One pass of verl over a micro-batch."""
        rollout = None if self.attached is None else self.attached.rollout
        engine = self._bare if self.attached is None or rollout is None else self.attached.engine
        loss_function = MinusMeanLogProb()
        with torch.set_grad_enabled(grad), self._probed() as given, _collapse_is_refused():
            loss, _ = engine.forward_step(_micro_batch(batch, rollout), loss_function, not grad)
        rows = _rows_of(batch)
        real = rows >= 0
        order = np.argsort(rows[real], kind="stable")
        ids = np.stack([given[path][0] for path in self._experts], axis=1)
        gates = np.stack([given[path][1] for path in self._experts], axis=1)
        others = {path: given[path][0] for path in given if path not in self._experts}
        seen = Seen(
            ids[real][order],
            loss_function.logprobs_R.numpy(),
            float(loss.detach()),
            gates[real][order],
            ids[~real] if not real.all() else None,
            others,
        )
        return TorchStep(seen, loss)


@contextmanager
def _collapse_is_refused() -> Iterator[None]:
    """Routes of one check send every token to the same experts, which this adapter takes for a failed capture."""
    try:
        yield
    except CaptureError as error:
        if "the capture of that layer failed" not in str(error):
            raise
        raise Unsupported(f"refused as a failed capture: {error}") from error


def _micro_batch(batch: Batch, rollout: RoutingTrace | None) -> TensorDict:
    """The sequences without padding, the first token of each as prompt, and their routes."""
    tokens = [torch.from_numpy(t.astype(np.int64)) for t in batch.sequences]
    data = TensorDict(
        {
            "input_ids": _nested(tokens),
            "position_ids": _nested([torch.arange(len(t)) for t in tokens]),
            "responses": _nested([t[1:] for t in tokens]),
            "response_mask": _nested([torch.ones_like(t[1:]) for t in tokens]),
        },
        batch_size=len(tokens),
    )
    if rollout is not None:
        data[FIELD] = routed_experts(rollout, data)
    tu.assign_non_tensor(data, temperature=1.0, use_remove_padding=batch.padding != "right")
    return data


def _rows_of(batch: Batch) -> np.ndarray[Any, Any]:
    """int64 [rows of the forward], the row of the kit that each is; -1 where verl pads."""
    if batch.padding != "right":
        return np.arange(batch.lengths.sum())
    rows = np.full((len(batch.sequences), int(batch.lengths.max())), -1)
    real = np.arange(rows.shape[1]) < batch.lengths[:, None]
    rows[real] = np.arange(batch.lengths.sum())
    return rows.reshape(-1)


class MinusMeanLogProb:
    """A loss of verl over every next token, which keeps what it was given.

    Attributes:
        logprobs_R: of every next token, once it was called.
    """

    logprobs_R: Tensor

    def __call__(self, model_output: Any, data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        """The loss, and no metrics."""
        logprobs_R = torch.cat([row[:-1] for row in model_output["log_probs"].unbind()])
        self.logprobs_R = logprobs_R.detach().clone()
        return -logprobs_R.mean(), {}


def _nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
