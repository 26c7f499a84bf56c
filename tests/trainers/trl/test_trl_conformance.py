"""The kit on our TRL adapter: the passes of a `GRPOTrainer`, in its layout, shuffled as TRL shuffles.

The model runs as TRL runs it: a prompt (here the first token), a completion, and log-probs from TRL's fused head. Under
replay the trace is a rollout, and its sequences travel through TRL's own shuffling by the numbers that the adapter puts
into a batch. A processor may round a row otherwise in another place of a batch, so that bits are compared in one order:
without replay rows are shuffled alike. While it is recorded, a forward has them as they come.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig
from trl.trainer import utils

from examples.trl.tiny import tokenizer
from foreroute.conformance import conformance_tests
from foreroute.conformance.adapter import Case, Unsupported
from foreroute.conformance.huggingface import Given, HuggingFaceModel, HuggingFaceUnderTest
from foreroute.testing.models import FAMILIES
from foreroute.trace import RoutingSpec, RoutingTrace
from foreroute.trainers.trl import GRPOTrainer
from foreroute.trainers.trl.capture import require_version
from foreroute.trainers.trl.rollout import ROWS, Rollout
from tests.trainers.trl.test_trl_masks import SCORES_ON_SETS


class TRLUnderTest(HuggingFaceUnderTest):
    """A family of transformers as the policy of a `GRPOTrainer`."""

    adapter = "foreroute.trainers.trl"
    scores_on_sets = True

    def build(self, case: Case) -> TRLModel:
        """The model of a family with TRL's head, and no trainer yet."""
        return TRLModel(super().build(case).model)

    def attach(self, model: Any) -> AttachedTrainer:  # type: ignore[override]
        """A trainer around the model."""
        model.attached = AttachedTrainer(model.model)
        return model.attached  # type: ignore[no-any-return]


class AttachedTrainer:
    """What a trainer replays, opened by hand."""

    def __init__(self, model: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.trainer = GRPOTrainer(
                model=model,
                processing_class=tokenizer(),
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                train_dataset=Dataset.from_dict({"prompt": ["a"]}),
                args=GRPOConfig(folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[]),
            )
        self.is_open, self.is_recording = False, False
        self._rollout: Any = None

    @property
    def spec(self) -> RoutingSpec:
        """Experts, picks and layers of the policy."""
        spec: RoutingSpec = self.trainer.routing.routed.spec
        return spec

    @contextmanager
    def record(self, **options: Any) -> Iterator[Any]:
        """What rollouts and R2 are recorded with."""
        self.is_recording = True
        try:
            with self.trainer.routing.routed.record(**options) as recording:
                yield recording
        finally:
            self.is_recording = False

    @contextmanager
    def replay(self, trace: RoutingTrace, *, weight_version: int | None = None) -> Iterator[None]:
        """The trace as the rollout of one training step."""
        routing = self.trainer.routing
        self.spec.require_same(trace.spec, what="the trace")
        if weight_version is not None:
            require_version(trace, weight_version)
        self._rollout = Rollout(trace, np.ones(len(trace), np.int64))
        routing.take(self._rollout)
        self.is_open = True
        try:
            with routing.training_step():
                yield
        finally:
            self.is_open = False

    def rows(self, mask: Tensor) -> dict[str, Tensor]:
        """What the adapter puts into a batch of this mask, in the order of the rollout."""
        self._rollout.mask_ST = None  # whole batches of several paddings are replayed from one rollout
        self._rollout.read_mask(mask, mask.shape[1] - 1)
        return {ROWS: torch.tensor([[self._rollout.number, row] for row in range(len(mask))])}

    def log_probs(self, batch: dict[str, Tensor]) -> Tensor:
        """[B, T - 1] of an update pass over a batch, shuffled or not."""
        ids = batch["ids"]
        with self.trainer.routing.updating(batch):
            logprobs: Tensor = self.trainer._get_per_token_logps_and_entropies(
                self.trainer.model, ids, batch["mask"], ids.shape[1] - 1
            )[0]
        return logprobs


class TRLModel(HuggingFaceModel):
    """A causal language model with TRL's head.

    Attributes:
        attached: the trainer around it, once there is one.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        if not hasattr(model, "get_output_embeddings"):
            raise Unsupported(f"{type(model).__name__} has no language modelling head for TRL to fuse")
        utils.add_fused_lm_head(model)
        self.attached: AttachedTrainer | None = None

    def next_logprobs(self, input_ids: Tensor, mask: Tensor, given: Given) -> Tensor:
        """One pass of TRL over shuffled rows, which is undone; under replay an update pass."""
        batch = {"ids": input_ids, "mask": mask, "order": torch.arange(len(input_ids))}
        replaying = self.attached if self.attached is not None and self.attached.is_open else None
        if replaying is not None:
            batch |= replaying.rows(mask)
        if self.attached is None or not self.attached.is_recording:
            batch = _shuffled(batch)
        if replaying is not None:
            logprobs = replaying.log_probs(batch)
        else:
            keep = input_ids.shape[1] - 1
            labels = batch["ids"].masked_fill(batch["mask"] == 0, -100)
            labels[:, :-keep] = -100
            out = self.model(input_ids=batch["ids"], attention_mask=batch["mask"], labels=labels, fused_lm_head=True)
            logprobs = out.log_probs[:, -keep:]
        back = torch.argsort(batch["order"])
        slots = np.arange(input_ids.numel()).reshape(input_ids.shape)[back.numpy()].reshape(-1)
        for path, (ids, gates) in given.items():
            given[path] = ids[slots], gates[slots]
        return logprobs[back]


def _shuffled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """By TRL's own function; gradients are sums, so that the same batch is shuffled in the same way each time."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(int(batch["ids"].sum()))
        shuffled: dict[str, Tensor] = utils.shuffle_sequence_dict(batch)
    return shuffled


test_conformance = SCORES_ON_SETS(pytest.mark.slow(conformance_tests(TRLUnderTest("qwen3_moe", FAMILIES["qwen3_moe"]))))
