"""The kit on our TRL adapter: the passes of a `GRPOTrainer`, in its layout, shuffled as TRL shuffles.

The model runs as TRL runs it: a prompt (here the first token), a completion, and log-probs from TRL's fused head. Under
replay the trace is a rollout, whose sequences travel through TRL's shuffling by the numbers that the adapter puts into
a batch. A processor may round a row otherwise in another place: without replay rows are shuffled alike.
"""

import tempfile
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from trl.trainer import utils

from foreroute.conformance import conformance_tests
from foreroute.conformance.adapter import Unsupported
from foreroute.conformance.huggingface import HuggingFaceModel, HuggingFaceUnderTest
from foreroute.testing.models import FAMILIES
from foreroute.trainers.trl.capture import require_version
from foreroute.trainers.trl.rollout import ROWS, Rollout
from tests.trainers.trl.test_trl_sampling import SCORES_ON_SETS
from tests.trainers.trl.trl_runs import make


class TRLUnderTest(HuggingFaceUnderTest):
    adapter = "foreroute.trainers.trl"
    scores_on_sets = True

    def build(self, case):
        return TRLModel(super().build(case).model)

    def attach(self, model):
        model.attached = AttachedTrainer(model.model)
        return model.attached


class AttachedTrainer:
    """What a trainer replays, opened by hand."""

    def __init__(self, model):
        with tempfile.TemporaryDirectory() as folder:
            self.trainer = make(folder, model=model, gradient_checkpointing=False)
        self.spec, self.rollout, self.is_recording = self.trainer.routing.routed.spec, None, False

    @contextmanager
    def record(self, **options):
        self.is_recording = True
        try:
            with self.trainer.routing.routed.record(**options) as recording:
                yield recording
        finally:
            self.is_recording = False

    @contextmanager
    def replay(self, trace, *, weight_version=None):
        """The trace as the rollout of one training step."""
        self.spec.require_same(trace.spec, what="the trace")
        if weight_version is not None:
            require_version(trace, weight_version)
        self.rollout = Rollout(trace, np.ones(len(trace), np.int64))
        self.trainer.routing.take(self.rollout)
        try:
            with self.trainer.routing.training_step():
                yield
        finally:
            self.rollout = None


class TRLModel(HuggingFaceModel):
    """A causal language model with TRL's head."""

    def __init__(self, model):
        super().__init__(model)
        if not hasattr(model, "get_output_embeddings"):
            raise Unsupported(f"{type(model).__name__} has no language modelling head for TRL to fuse")
        utils.add_fused_lm_head(model)
        self.attached = None

    def next_logprobs(self, input_ids, mask, given):
        """One pass of TRL over shuffled rows, which is undone; under replay an update pass."""
        batch = {"ids": input_ids, "mask": mask, "order": torch.arange(len(input_ids))}
        attached, keep = self.attached, input_ids.shape[1] - 1
        replays = attached is not None and attached.rollout is not None
        if replays:
            attached.rollout.mask_ST = None  # whole batches of several paddings are replayed from one rollout
            attached.rollout.read_mask(mask, keep)
            batch[ROWS] = torch.tensor([[attached.rollout.number, row] for row in range(len(mask))])
        if attached is None or not attached.is_recording:
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                torch.manual_seed(int(input_ids.sum()))  # the same batch is shuffled in the same way each time
                batch = utils.shuffle_sequence_dict(batch)
        if replays:
            with attached.trainer.routing.updating(batch):
                score = attached.trainer._get_per_token_logps_and_entropies
                logprobs = score(attached.trainer.model, batch["ids"], batch["mask"], keep)[0]
        else:
            labels = batch["ids"].masked_fill(batch["mask"] == 0, -100)
            labels[:, :-keep] = -100
            out = self.model(input_ids=batch["ids"], attention_mask=batch["mask"], labels=labels, fused_lm_head=True)
            logprobs = out.log_probs[:, -keep:]
        back = torch.argsort(batch["order"])
        slots = np.arange(input_ids.numel()).reshape(input_ids.shape)[back.numpy()].reshape(-1)
        for path, (ids, gates) in given.items():
            given[path] = ids[slots], gates[slots]
        return logprobs[back]


test_conformance = SCORES_ON_SETS(pytest.mark.slow(conformance_tests(TRLUnderTest("qwen3_moe", FAMILIES["qwen3_moe"]))))
