"""One training step under a plan: `torchrun --nproc-per-node 4 examples/expert_parallel/execute_plan.py`.

transformers spreads a small Qwen3-MoE over the ranks. Every rank samples from it, and the routes of its sequences are
recorded. They say how many rows each expert will get in each micro-step, before one of them is trained on. A plan puts
replicas of busy experts into free slots of other ranks. The step then runs twice, with every expert at its home and
under the plan: the rows of the busiest rank fall, and the loss stays.
"""

from __future__ import annotations

import tempfile

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import foreroute as fr
from foreroute.adapters import hf
from foreroute.plan import Links, StepPlan, Topology
from foreroute.planner import plan

MICRO_STEPS, SEQUENCES, PROMPT, SAMPLED = 4, 2, 4, 28
REDUNDANT_SLOTS = 2  # on each rank, for replicas
ONE_MACHINE = Links(  # orders of magnitude for gloo between processes
    node_bytes_per_s=2e9, cluster_bytes_per_s=1e9, host_bytes_per_s=1e10, node_latency_s=5e-5, cluster_latency_s=1e-4
)
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
}


def main() -> None:
    """Plan one step, run it both ways, and compare."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = spread(num_ranks)
    routed = hf.attach(model)

    rollouts = [sample(routed, seed=1000 * rank + m) for m in range(MICRO_STEPS)]
    counts_MLGE = routed.gather_counts([trace for _, trace in rollouts])
    topology = Topology(num_ranks, ranks_per_node=num_ranks, redundant_slots=REDUNDANT_SLOTS, links=ONE_MACHINE)
    planned = routed.share_plan(lambda: plan(counts_MLGE, topology, home_LE=routed.home_LE))

    for name, step_plan in (("experts at home", None), ("planned", planned)):
        loss, executed_ML = run_step(routed, rollouts, step_plan, counts_MLGE)
        busiest = busiest_over_mean(executed_ML, num_ranks)
        if rank == 0:
            print(f"{name:16}  rows of the busiest rank / mean {busiest:.3f}   loss {loss:.9f}", flush=True)
    dist.destroy_process_group()


def spread(num_ranks: int) -> torch.nn.Module:
    """The model, as it is loaded from a folder: a rank holds its own experts, and a part of all else."""
    config = DistributedConfig(fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation="foreroute")
    with tempfile.TemporaryDirectory() as mine:
        if dist.get_rank() == 0:
            hf.build_model("qwen3_moe", seed=0, **SIZES).save_pretrained(mine)
        folder = [mine]
        dist.broadcast_object_list(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder[0], dtype=torch.float32, distributed_config=config, trust_remote_code=False, use_safetensors=True
        )
        dist.barrier()
    return model


def sample(routed: hf.RoutedTransformer, seed: int) -> tuple[torch.Tensor, fr.RoutingTrace]:
    """The sequences of one micro-step, int64 [S, T], and the routes that they were sampled under."""
    torch.manual_seed(seed)
    prompts = torch.randint(1, SIZES["vocab_size"], (SEQUENCES, PROMPT))
    with routed.record() as recording:
        sequences = routed.model.generate(
            prompts, do_sample=True, min_new_tokens=SAMPLED, max_new_tokens=SAMPLED, pad_token_id=0
        )
    return sequences, recording.rollout(sequences)


def run_step(
    routed: hf.RoutedTransformer,
    rollouts: list[tuple[torch.Tensor, fr.RoutingTrace]],
    step_plan: StepPlan | None,
    counts_MLGE: np.ndarray,
) -> tuple[float, np.ndarray]:
    """Forward and backward of every micro-step: the mean loss of all ranks, and the rows that this one computed [M, L].

    Without a plan every expert stays at home.
    """
    total = torch.zeros((), dtype=torch.float64)
    with routed.execute(step_plan, counts_MLGE, [trace for _, trace in rollouts]) as execution:
        for sequences, trace in rollouts:
            with routed.replay(trace):
                loss = routed.model(sequences, labels=sequences, use_cache=False).loss / len(rollouts)
                loss.backward()
            total += loss.detach()
    routed.model.zero_grad(set_to_none=True)  # an optimizer's step would come before
    dist.all_reduce(total)
    return float(total) / dist.get_world_size(), execution.executed_ML


def busiest_over_mean(executed_ML: np.ndarray, num_ranks: int) -> float:
    """Rows of the busiest rank over the mean, summed over micro-steps and layers: each is waited for by all ranks."""
    parts = [torch.empty(executed_ML.shape, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(parts, torch.from_numpy(executed_ML))
    executed_GML = torch.stack(parts).double()
    return float(executed_GML.amax(0).sum() / executed_GML.mean(0).sum())


if __name__ == "__main__":
    main()
