"""GRPO with rollouts of vLLM, updates in Megatron-Core under executed plans, and weights that go back every step.

    V=.venv-vllm/bin/python
    torchrun --nproc-per-node 2 -m examples.pipeline.train runs/pipeline --vllm-python $V                # EP 2
    torchrun --nproc-per-node 4 -m examples.pipeline.train runs/pipeline --vllm-python $V --pipeline 2   # EP 2 x PP 2

`--tensor 2` has ranks share the dense weights too, and `--experts 2` on four ranks two groups share the experts.

The policy learns to answer with even tokens. Every rollout is kept in the run folder, and `--rollouts` trains on
those of another run without an engine: on other ranks, for example, or in float64. A run that ended goes on from its
last checkpoint by the same command.
"""

from __future__ import annotations

import argparse
import json
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from foreroute.testing import megatron_on_cpu as on_cpu

on_cpu.install()  # a machine with GPUs needs neither this nor what policy.py takes of it
on_cpu.write_checkpoints_without_server()

from megatron.core import parallel_state as mpu

from examples.pipeline import checkpoints, sync
from examples.pipeline.passes import forward_step, micro_batches, replayed_logprobs, run
from examples.pipeline.policy import VOCABULARY, WIDTH, Policy, make_checkpoint
from foreroute.adapters.checkpoint import FolderWriter, ServedModel, Weights
from foreroute.capture import Generation, Sampling, load_generation
from foreroute.costs import hardware_preset
from foreroute.engines.vllm import ServerSettings, VLLMEngine
from foreroute.mismatch import routing_mismatch, token_mismatch
from foreroute.plan import PlanOptions
from foreroute.planner import plan
from foreroute.trace import concatenate

GROUPS, GROUP, PROMPT = 4, 8, 4
"""Prompts of a step; answers to each, which are a micro-batch; tokens of a prompt."""
SAMPLING = Sampling(max_new_tokens=WIDTH - PROMPT, end_token=0, group_size=GROUP)
UPDATES, LEARNING_RATE = 2, 1e-3
"""Optimizer steps on each rollout."""
METRICS = "metrics.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the run; new, or of one that goes on; seen by every rank")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--vllm-python", type=Path, help="the interpreter of an environment with vLLM")
    source.add_argument("--rollouts", type=Path, help="of another run: train on them, without an engine")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks in a stage")
    parser.add_argument("--experts", type=int, help="ranks that share the experts; by default all of a stage")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of the trainer")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")

    def start_vllm(checkpoint: Path) -> VLLMEngine:
        settings = ServerSettings(python=arguments.vllm_python, precision="float32")
        return VLLMEngine(ServedModel.at(checkpoint), settings)

    dtype = getattr(torch, arguments.dtype)
    split = Split(arguments.pipeline, arguments.tensor, arguments.experts)
    train(arguments.folder, arguments.rollouts or start_vllm, split, arguments.steps, dtype)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Split:
    """How ranks share the model. Ranks beyond it are data-parallel, of experts too.

    Attributes:
        stages: of the pipeline.
        tensor: tensor-parallel ranks in a stage.
        experts: ranks that share the experts; None for all of a stage.
    """

    stages: int = 1
    tensor: int = 1
    experts: int | None = None

    def initialize(self) -> None:
        """Make Megatron's process groups. Ends the program where the ranks cannot be shared out like that."""
        ranks = dist.get_world_size()
        of_stage, left = divmod(ranks, self.stages)
        experts = self.experts or of_stage
        if left or of_stage % self.tensor or of_stage % experts or GROUPS % (of_stage // self.tensor):
            raise SystemExit(
                f"{ranks} ranks cannot share {GROUPS} prompts evenly in {self.stages} pipeline stages of {self.tensor} "
                f"tensor-parallel and {experts} expert-parallel ranks; take numbers that divide"
            )
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=self.tensor,
            pipeline_model_parallel_size=self.stages,
            expert_model_parallel_size=experts,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )


def train(folder: Path, rollouts: Path | sync.StartEngine, split: Split, steps: int, dtype: torch.dtype) -> None:
    """Train, and write metrics, rollouts, checkpoints and the trained policy to a folder.

    Args:
        folder: new, or of a run that goes on from its last checkpoint; seen by every rank.
        rollouts: of another run; or what starts an engine on a checkpoint, on the first rank.
        split: the same as before, where a run goes on.
        steps: rollouts to train on, those before the last checkpoint included.
        dtype: of the trainer.
    """
    split.initialize()
    sync.on_first_rank(lambda: folder.mkdir(parents=True, exist_ok=True))
    with sync.ending_together(folder):
        _train(folder, rollouts, steps, dtype)


def _train(folder: Path, rollouts: Path | sync.StartEngine, steps: int, dtype: torch.dtype) -> None:
    checkpoint = folder / "initial"
    sync.on_first_rank(lambda: None if checkpoint.exists() else make_checkpoint(checkpoint))
    with nullcontext() if isinstance(rollouts, Path) else sync.started(rollouts, checkpoint) as engine:
        policy = Policy.of(checkpoint, dtype)
        optimizer = checkpoints.make_optimizer(policy, LEARNING_RATE)
        done = checkpoints.load(policy, optimizer, folder / "checkpoints")
        sync.on_first_rank(partial(keep_reports, folder, done))
        for step in range(done, steps):
            metrics: dict[str, float] = {}
            name = Path("rollouts") / f"step-{step:03}.safetensors"
            if isinstance(rollouts, Path):
                generation = load_generation(rollouts / name.name)
            else:
                metrics |= send_weights(policy, engine, folder, version=step)
                generation = sync.shared(folder / name, partial(sample, engine, step))
            batches = micro_batches(generation, policy, GROUP)
            metrics |= recompute(policy, batches, generation)
            metrics |= update(policy, optimizer, batches)
            if dist.get_rank() == 0:
                report(folder, {"step": step, **metrics})
            checkpoints.save(policy, optimizer, folder / "checkpoints", step)
        sync.hand_over(policy.exported(), partial(write_trained, folder))


def send_weights(policy: Policy, engine: Any, folder: Path, version: int) -> dict[str, float]:
    """Give the engine the weights of now, and see whether it has them."""
    sync.hand_over(policy.exported(), lambda weights: engine.load_weights(weights, version))
    return sync.check_canary(policy, engine, folder)


def sample(engine: Any, step: int) -> Generation:
    """The engine's answers to the prompts of a step."""
    prompts = np.random.default_rng(step).integers(0, VOCABULARY, (GROUPS, PROMPT), dtype=np.int32)
    generation: Generation = engine.generate(list(prompts), SAMPLING, torch.Generator().manual_seed(step))
    return generation


def recompute(policy: Policy, batches: list[dict[str, Any]], generation: Generation) -> dict[str, float]:
    """Give each batch its old log-probabilities and advantages; say how far trainer and engine are apart."""
    with policy.routed.record() as recording:
        old_R = replayed_logprobs(policy, batches, generation)
    asked = concatenate([batch["trace"] for batch in batches])
    routing = routing_mismatch(asked, recording.trace().truncated(asked.lengths))
    differing = torch.tensor([routing.differing_L.sum(), routing.rows * asked.spec.num_layers])
    dist.all_reduce(differing)
    lengths = generation.response_lengths
    rewards = np.array([(generation.response(sequence) % 2 == 0).mean() for sequence in range(len(generation))])
    grouped = rewards.reshape(-1, GROUP)
    advantages = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, keepdims=True) + 1e-4)
    of_tokens = {
        "old": old_R,
        "advantages": np.repeat(advantages.reshape(-1), lengths),
        "weights": np.repeat(1 / (lengths * GROUP), lengths),
    }
    for batch in batches:
        for name, values_R in of_tokens.items():
            batch[name] = torch.from_numpy(values_R[batch["of_rollout"]]).to(policy.model.config.params_dtype)
    return {
        "reward": float(rewards.mean()),
        "k3": token_mismatch(old_R, generation.logprobs_R).k3,
        "disagreement": float(differing[0] / differing[1]),
    }


def update(policy: Policy, optimizer: Any, batches: list[dict[str, Any]]) -> dict[str, float]:
    """Optimizer steps of the clipped policy gradient under one plan; then experts move to where the load asks."""
    routed, routes = policy.routed, [batch["routes"] for batch in batches]
    counts_MLGE = routed.gather_counts(routes)
    ranks = counts_MLGE.shape[2]
    topology = hardware_preset("h100").topology(ranks, redundant_slots=2 if ranks > 1 else 0)
    planned = plan(counts_MLGE, topology, home_LE=routed.home_LE)
    metrics = {}
    for number in range(UPDATES):
        optimizer.zero_grad(set_to_none=False)
        with routed.execute(planned, counts_MLGE, routes) as execution:
            reported = run(policy.model, batches, routed.replaying(forward_step))
        # tensor ranks report alike
        mine = 0.0 if mpu.get_tensor_model_parallel_rank() else sum(map(float, reported))
        loss = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(loss)
        metrics[f"loss_{number}"] = float(loss) / GROUPS
        average_gradients(policy.model)
        optimizer.step()
    metrics |= loads(policy, execution, counts_MLGE)
    optimizer.zero_grad(set_to_none=False)
    everywhere = of_all_groups(counts_MLGE)
    homes = plan(everywhere, topology, PlanOptions(home_moves=2, replicas=False), home_LE=routed.home_LE)
    metrics["moved_bytes"] = routed.move_homes(homes, optimizer)
    return metrics


def average_gradients(model: Any) -> None:
    """Over data-parallel ranks, by hand: Megatron's DistributedDataParallel wants CUDA."""
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):  # each tensor rank has seen its rows
            dist.all_reduce(parameter.grad, group=mpu.get_tensor_model_parallel_group())
        is_dense = getattr(parameter, "allreduce", True)
        group = mpu.get_data_parallel_group() if is_dense else mpu.get_expert_data_parallel_group()
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= mpu.get_data_parallel_world_size()


def of_all_groups(counts_MLGE: NDArray[np.int32]) -> NDArray[np.int32]:
    """Counts of the groups of expert data parallelism, which share homes, one after another along the first axis."""
    group = mpu.get_expert_data_parallel_group()
    everywhere: list[Any] = [None] * group.size()
    dist.all_gather_object(everywhere, counts_MLGE, group=group)
    return np.concatenate(everywhere)


def loads(policy: Policy, execution: Any, counts_MLGE: NDArray[np.int32]) -> dict[str, float]:
    """The slowest rank's rows over the mean, added up over all cells: at homes, by the plan, and as experts counted."""
    here = [policy.routed.spec.layers.index(layer) for layer in policy.routed.layers]
    ranks = counts_MLGE.shape[2]
    loads_MLE, home_LE = counts_MLGE.sum(2)[:, here], execution.plan.home_LE[here]
    at_home_GML = np.stack([(loads_MLE * (home_LE == rank)).sum(2) for rank in range(ranks)])
    slowest_ML = torch.from_numpy(execution.executed_ML[:, here])
    dist.all_reduce(slowest_ML, dist.ReduceOp.MAX, group=mpu.get_expert_model_parallel_group())
    rows = {
        "slowest_rank_at_homes": at_home_GML.max(0).sum(),
        "planned": execution.plan.max_load_ML[:, here].sum(),
        "executed": slowest_ML.sum(),
        "mean": loads_MLE.sum() / ranks,
    }
    of_all = torch.tensor([float(each) for each in rows.values()], dtype=torch.float64)
    dist.all_reduce(of_all)  # over stages, and over groups of expert data parallelism
    *slowest, mean = of_all.tolist()
    return {name: each / mean for name, each in zip(rows, slowest, strict=False)}


def keep_reports(folder: Path, steps: int) -> None:
    """Drop those of steps that are made again."""
    path = folder / METRICS
    if path.exists():
        path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:steps]))


def report(folder: Path, metrics: dict[str, float]) -> None:
    with open(folder / METRICS, "a") as lines:
        lines.write(json.dumps(metrics) + "\n")
    print(", ".join(f"{name} {value:.3g}" for name, value in metrics.items()), flush=True)


def write_trained(folder: Path, weights: Weights) -> None:
    if (folder / "trained").exists():  # of fewer steps
        shutil.rmtree(folder / "trained")
    FolderWriter(folder / "initial").write(folder / "trained", weights)


if __name__ == "__main__":
    main()
