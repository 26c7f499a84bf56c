"""Steps of the trainer in float64, on several ranks and on one process that is given their rollouts; and whole runs."""

from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from foreroute.adapters import hf
from foreroute.adapters.hf import loading
from foreroute.adapters.hf.memory import MICRO_STEPS
from foreroute.capture import Generation
from foreroute.costs.memory import SIZES as BYTES_FOLLOW
from foreroute.costs.memory import WORKS, MemorySection, StepMemory
from foreroute.errors import ForecastError
from foreroute.train import RunFolder, memory, train
from foreroute.train.chain import VOCABULARY, ChainTask
from foreroute.train.experts import make_execution
from foreroute.train.folder import load_checkpoint
from foreroute.train.loop import make_trainer
from foreroute.train.policy import make_engine, make_model, make_policy, set_weights, to_training
from foreroute.train.prompts import make_task
from foreroute.train.ranks import join_ranks
from foreroute.train.run import Watcher
from tests.train.small_runs import SIZES, small_config

TIMEOUT_S = 200.0
"""For an exchange: the first plan of a machine waits until its kernels are compiled."""
ONE_LAYER = {"sizes": {**SIZES, "num_hidden_layers": 1}}


@dataclass
class Steps:
    """What rank 0 knows of them, records as lines of metrics, and the state after the last."""

    records: list
    generations: list[Generation]
    state: dict


def config_of(num_ranks, *, model=None, **chosen):
    """Of these settings those of `[rl]`, and the others of `[parallel]`."""
    rl = {name: chosen.pop(name) for name in ("routing", "mini_steps", "method", "correction") if name in chosen}
    parallel = {}
    if num_ranks > 1:
        options = {"tolerance": 0.0, **chosen.pop("plan", {})}
        parallel = {"expert": num_ranks, "plan": options, "timeout_s": TIMEOUT_S, **chosen}
    # grouped_mm knows no float64
    return small_config(
        model={"experts_implementation": "eager", "sizes": dict(SIZES), **(model or {})},
        rollout={"prompts": 8},
        rl={"routing": "R3", "mini_steps": 1, "micro_step_tokens": 96, **rl},
        parallel=parallel,
    )


def parallel_steps(rank, config, count, checkpoint=None):
    with precise_trainer(config) as trainer:
        if checkpoint is not None:
            trainer.restore(load_checkpoint(checkpoint))
        return steps_of(trainer, count)


@contextmanager
def precise_trainer(config):
    with join_ranks(config.parallel.expert, config.parallel.timeout_s) as ranks:
        policy = precise_policy(config, ranks.size)
        engine = make_engine(config, policy)
        with closing(make_execution(config, policy, ranks)) as execution:
            yield make_trainer(config, make_task(config), policy, engine, execution)


def steps_budgeted(rank, config):
    """One step each: within a budget that all fits in, in one that it passes by a byte, and in one of a byte."""

    def steps(memory_budget):
        parallel = config.parallel.model_copy(update={"memory_budget": memory_budget})
        return parallel_steps(rank, config.model_copy(update={"parallel": parallel}), 1)

    with mock.patch.object(memory, "measure_memory", one_for_each_token):
        plenty = steps(10**15)
        most = [plenty.records[0] and plenty.records[0]["execution"]["forecast_memory_bytes"]]
        dist.broadcast_object_list(most, group_src=0)
        kept = steps(most[0] - 1)
        try:
            steps(1)
        except ForecastError as error:
            return plenty, kept, str(error)


def one_for_each_token(routed, traces, targets_M, compute_loss, topology):
    """In the place of `measure_memory`: a byte a token. Runs a micro-step, whose head must have the rows it is said."""
    rows = []
    head = routed.model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[:-1].numel()))
    compute_loss(0).backward()
    handle.remove()
    assert rows == targets_M[:1]
    assert len(traces) == len(targets_M) == MICRO_STEPS
    routed.model.zero_grad(set_to_none=True)
    bytes_X = np.eye(len(BYTES_FOLLOW))[BYTES_FOLLOW.index("tokens")]
    section = MemorySection(0, "forward", dict.fromkeys(WORKS, (bytes_X[None], 0 * bytes_X)))
    return StepMemory(1, 1, [section])


def steps_unscaled(rank, config, count):
    """As if gradients of experts were added up over ranks, and not averaged as the others are."""
    with mock.patch.object(FSDPModule, "set_gradient_divide_factor"):
        return parallel_steps(rank, config, count)


def steps_alone(config, generations):
    policy, waiting = precise_policy(config), list(generations)
    sampled = SimpleNamespace(load_weights=lambda *_, **__: None, generate=lambda *_, **__: waiting.pop(0))
    trainer = make_trainer(config, make_task(config), policy, sampled)
    return steps_of(trainer, len(generations))


def steps_of(trainer, count):
    with scored_by_tokens():
        experiences, records = zip(*[trainer.run_step() for _ in range(count)], strict=True)
    return Steps(
        [None if record is None else record.to_json() for record in records],
        [experience.generation for experience in experiences],
        trainer.state(),
    )


def precise_policy(config, num_ranks=1):
    """Its weights are those of the seed, in float64."""
    task = make_task(config)
    alone = make_model(config.model, task, config.seed).double()
    if num_ranks == 1:
        to_training(alone)
        return hf.attach(alone)
    load = loading.load_complete
    with mock.patch.object(loading, "load_complete", lambda *a, **b: load(*a, **{**b, "dtype": torch.float64})):
        policy = make_policy(config, task)
    set_weights(policy.model, alone.state_dict(), SimpleNamespace(size=num_ranks))
    for module in policy.model.modules():
        if type(module).__name__.endswith("Experts"):
            # FSDP2 over one rank divides float64 twice by a factor that it is given (findings/fsdp2_divides_twice.sh)
            module.set_gradient_divide_factor(num_ranks**0.5)
    return policy


@contextmanager
def scored_by_tokens():
    """Rewards that a model without training gets too, and that leave some ranks with less to learn than others."""

    def rewards(task, problems, responses):
        texts = ["".join(VOCABULARY[token] for token in tokens) for tokens in responses]
        hard = [problem.prompt[0] in "01234" for problem in problems]
        points = [0 if hard[s] else sum(map(ord, text)) % 5 for s, text in enumerate(texts)]
        return np.array(points, np.float64)

    with mock.patch.object(ChainTask, "rewards", rewards):
        yield


def run_config(num_ranks, **sections):
    sections["rl"] = {"steps": 2, "micro_step_tokens": 96, **sections.get("rl", {})}
    parallel = {"expert": num_ranks, "timeout_s": TIMEOUT_S, **sections.pop("parallel", {})}
    sections = {"warm_start": {"max_steps": 1}, **sections}
    return small_config(rollout={"prompts": 8}, parallel=parallel if num_ranks > 1 else {}, **sections)


def run(rank, config, folder, resume=False, stop_after=None):
    """Rank 0 alone is asked to stop."""
    seen = []
    stopping = Watcher(on_step=seen.append, should_stop=lambda: stop_after is not None and len(seen) >= stop_after)
    with scored_by_tokens():
        train(config, folder, resume=resume, watcher=stopping)
    return len(seen)


def step_on(rank, config, folder, step):
    """Go on from a checkpoint in float64 for one step, and save the next; rank 0 tells of it."""
    steps = parallel_steps(rank, config, 1, path_of(folder, step))
    if rank == 0:
        RunFolder(folder).save_checkpoint(steps.state, data="", keep=99)
        return steps
    return None


def path_of(folder, step):
    return folder / "checkpoints" / f"step-{step:06d}.safetensors"
