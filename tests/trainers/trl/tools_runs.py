"""TRL runs of one step with a tool in the loop, and the gradients that they should have. No pytest is needed.

The oracle is the Hugging Face model in float64, its selection forced by hand, under the loss of TRL on sampled tokens.
"""

import copy

import numpy as np
import torch

from examples.trl.tiny import agent, chat_tokenizer, look_up
from foreroute.capture import Generation, Sampling
from foreroute.trace import extended
from foreroute.trainers.trl import GRPOTrainer, rollout_output
from tests.trainers.trl import trl_runs

PROMPTS = [[{"role": "user", "content": f"{'very ' * (i % 3)}many {i}"}] for i in range(32)]
ONE_STEP = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_iterations": 1,
    "num_generations": 4,
    "max_steps": 1,
    **trl_runs.NO_AUXILIARY,
    "max_completion_length": 50,
    "max_grad_norm": 0.0,
}


class Noting(GRPOTrainer):
    """Keeps the batch of the last rollout, and the gradients of the last step."""

    def _generate_and_score_completions(self, inputs):
        self.batch = super()._generate_and_score_completions(inputs)
        return self.batch

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.gradients = {name: each.grad.double().clone() for name, each in self.model.named_parameters()}
        return loss


class Counter:
    """An environment of TRL whose method is the tool of the tokenizer's template."""

    def reset(self, **_):
        self.calls = 0

    def look_up(self, text: str) -> str:
        """Count.

        Args:
            text: any.
        """
        self.calls += 1
        return f"{self.calls}"


def told_apart(completion_ids, **_):
    """A reward by the tokens, so that hardly two sequences have the same and each has an advantage."""
    return [float(sum(ids) % 101) for ids in completion_ids]


def make(folder, *, model=None, cls=Noting, tools=(look_up,), **settings):
    own = {"processing_class": chat_tokenizer(), "reward_funcs": told_apart, "prompts": PROMPTS, "tools": list(tools)}
    return trl_runs.make(folder, cls=cls, model=model or agent(), **own, **{**ONE_STEP, **settings})


def trained(folder, **settings):
    trainer = make(folder, **settings)
    trainer.train()
    return trainer


def sequences_of(trainer):
    """(tokens, which of them were sampled, advantage) of each sequence of TRL's own batch."""
    batch = trainer.batch
    for s, completed in enumerate(batch["completion_mask"].bool()):
        prompt = batch["prompt_ids"][s][batch["prompt_mask"][s].bool()].tolist()
        sampled = batch["tool_mask"][s][completed].bool().tolist()
        tokens = prompt + batch["completion_ids"][s][completed].tolist()
        yield tokens, np.array([False] * len(prompt) + sampled), float(batch["advantages"][s])


def oracle(model, sequences, routes_of):
    """Gradients, float64, of minus advantage times log-prob, over sampled tokens alone, per sampled token."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # grouped matrix products have no float64
    total = 0.0
    for tokens, sampled, advantage in sequences:
        routes = torch.from_numpy(routes_of(tokens)[: len(tokens) - 1])
        for block, ids in zip(model.model.layers, routes.unbind(1), strict=True):
            block.mlp.gate.forward = forced(block.mlp.gate, ids)
        logits = model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        total = total - advantage * logprobs[torch.from_numpy(sampled[1:])].sum()
    (total / sum(sampled.sum() for _, sampled, _ in sequences)).backward()
    return {name: each.grad for name, each in model.named_parameters()}


def forced(gate, ids_TK):
    def forward(hidden):
        logits = hidden.reshape(-1, gate.hidden_dim) @ gate.weight.T
        given = logits.softmax(-1).gather(-1, ids_TK)
        return logits, given / given.sum(-1, keepdim=True), ids_TK

    return forward


def branching(engine):
    """A `rollout_func` of an agent that forks and compacts: of each four sequences, what they train is theirs alone.

    A first turn and what follows a tool; another continuation of the first turn, which is trained in the first
    sequence; a turn on a summary in the place of the conversation; and a conversation of one turn.
    """

    def roll_out(prompts, trainer):
        sampling, generator = Sampling(12, 1), torch.Generator().manual_seed(3)
        parts = []

        def turn(tokens):
            return engine.generate([np.array(tokens, np.int32)], sampling, generator)

        for prompt in trainer._tokenize_prompts(prompts)[0][::4]:
            first = turn(prompt)
            whole = first.trace.tokens(0).tolist()
            for tool in ([40, 41, 42], [50]):
                second = turn(whole + tool)
                trace = extended(first.trace, second.trace)
                sampled = np.arange(trace.num_rows) >= len(whole) + len(tool)
                logprobs = [second.logprobs_R]
                if tool == [40, 41, 42]:
                    sampled[len(prompt) : len(whole)] = True
                    logprobs = [first.logprobs_R, second.logprobs_R]
                prompts_of = np.array([int(np.flatnonzero(sampled)[0])])
                parts.append(Generation(trace, prompts_of, np.concatenate(logprobs), sampled))
            parts += [turn([60, 61, *prompt[-3:]]), turn(prompt)]
        return rollout_output(Generation.concatenate(parts))

    return roll_out
