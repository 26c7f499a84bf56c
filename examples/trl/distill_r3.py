"""TRL's distillers with rollout routing replay of the student: put these classes in the place of TRL's (1.16).

A student is trained on tokens that it sampled. Here it is trained on the experts that it sampled them with too, on
`foreroute.core` alone. A teacher that only scores routes itself; one that samples (`seq_kd`) scores on its own routes.
"""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import trl
from torch.nn.functional import pad
from trl.experimental import gkd
from trl.generation import vllm_generation

from foreroute.core import attach


class GKDTrainer(gkd.GKDTrainer):
    """TRL's, which samples by `generate`.

    Args:
        samples_for: gives the model that samples in the place of one of the trainer's, such as a copy in bfloat16.
    """

    def __init__(self, *args: Any, samples_for: Callable[[Any], Any] = lambda model: model, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._samples_for = samples_for
        self._student = attach(self.model)
        self._teacher = attach(self.accelerator.unwrap_model(self.teacher_model)) if self.seq_kd else None
        self._rollout = None  # who sampled the sequences of this step, the sequences, their routes

    def training_step(self, model, inputs, num_items_in_batch=None):
        self._rollout = None
        return super().training_step(model, inputs, num_items_in_batch)

    def generate_on_policy_outputs(self, model, inputs, generation_config):
        sampler = self._samples_for(model)
        of_teacher = self._teacher is not None and model is self._teacher.model
        owner = self._teacher if of_teacher else self._student
        with (owner if sampler is owner.model else attach(sampler)).record() as recording:
            sampled = super().generate_on_policy_outputs(sampler, inputs, generation_config)
        routes_BTLK = recording.ids()[-1]  # without a cache, the last forward has run on all of the sequences
        self._rollout = owner, sampled[0], pad(routes_BTLK, (0, 0, 0, 0, 0, 1), value=-1)
        return sampled

    def compute_loss(self, model, inputs, *args, **kwargs):
        rollout, self._rollout = self._rollout, None
        if rollout is None:  # sequences of the data set
            return super().compute_loss(model, inputs, *args, **kwargs)
        owner, tokens, routes_BTLK = rollout
        if not torch.equal(tokens, inputs["input_ids"]):
            raise RuntimeError("the loss is of other sequences than those that were sampled in this step")
        with owner.replay(routes_BTLK, inputs["attention_mask"]):
            return super().compute_loss(model, inputs, *args, **kwargs)


class DistillationTrainer(trl.DistillationTrainer):
    """TRL's, which samples by `generate` or by vLLM in its own process. Without tools and images."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _vllm_returns_routes():
            super().__init__(*args, **kwargs)
        if self.tools or self._is_vlm or (self.use_vllm and self.args.vllm_mode != "colocate"):
            raise NotImplementedError(
                "routes are read of one turn of text, sampled by generate or vLLM in this process"
            )
        self._student = attach(self.model)
        # model.layers.3.mlp.gate -> 3; vLLM counts decoder layers without a router too
        paths = [router.path for router in self._student.report()]
        self._layers = [next(int(part) for part in path.split(".") if part.isdigit()) for path in paths]

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        sample = partial(super()._generate_single_turn, prompt_ids, *args, **kwargs)
        if self.use_vllm:
            answers = []
            ask = self.vllm_generation.llm.generate
            with patch.object(
                self.vllm_generation.llm, "generate", lambda *a, **k: answers.append(ask(*a, **k)) or answers[-1]
            ):
                completions = sample()
            [requests] = answers
            # without routes in it, the answer is an error: of a vLLM that was started by another
            given = [torch.as_tensor(request.outputs[0].routed_experts) for request in requests]
            routes = [ids if ids.shape[1] == len(self._layers) else ids[:, self._layers] for ids in given]
        else:
            with self._student.record() as recording:
                completions = sample()
            recorded = recording.ids()[-1]
            width = recorded.shape[1] + 1 - max(map(len, completions))  # of the prompts, padded on the left
            spans = [(width - len(p), width + len(c) - 1) for p, c in zip(prompt_ids, completions, strict=True)]
            routes = [ids[slice(*span)] for ids, span in zip(recorded, spans, strict=True)]
        for prompt, completion, ids in zip(prompt_ids, completions, routes, strict=True):
            if len(ids) != len(prompt) + len(completion) - 1:
                raise RuntimeError(f"{len(ids)} rows of routes for {len(prompt)} + {len(completion)} tokens")
        self._routes = routes
        return completions

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        # a tensor of the batch is shuffled and split with it
        batch["routes"] = torch.full((*mask.shape, *self._routes[0].shape[1:]), -1, dtype=torch.int16)
        for row, first, ids in zip(batch["routes"], mask.int().argmax(1).tolist(), self._routes, strict=True):
            row[first : first + len(ids)] = ids
        return batch

    def _compute_loss(self, unwrapped_student, inputs, num_items_in_batch):
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with self._student.replay(inputs["routes"], mask):
            return super()._compute_loss(unwrapped_student, inputs, num_items_in_batch)


@contextmanager
def _vllm_returns_routes():
    """Have TRL start its vLLM with a setting that TRL has not."""
    if not hasattr(vllm_generation, "LLM"):  # vLLM is not installed
        yield
        return
    with patch.object(vllm_generation, "LLM", partial(vllm_generation.LLM, enable_return_routed_experts=True)):
        yield
