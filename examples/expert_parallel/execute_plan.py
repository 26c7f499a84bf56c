"""One training step under a plan: `torchrun --nproc-per-node 4 examples/expert_parallel/execute_plan.py`.

Every rank samples from a small Qwen3-MoE, and the routes of its sequences are recorded. They say how many rows each
expert will get in each micro-step, before one of them is trained on. A plan puts replicas of busy experts into free
slots of other ranks. The step then runs twice, with every expert at its home and under the plan: the rows of the
busiest rank fall, and the loss does not change.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

import foreroute as fr
from foreroute.adapters import hf
from foreroute.ep import ExpertParallelModel
from foreroute.plan import Links, PlanOptions, StepPlan, Topology
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
    model = hf.build_model("qwen3_moe", seed=0, **SIZES)  # the same weights on every rank
    routed = hf.attach(model)

    rollouts = [sample(routed, seed=1000 * rank + m) for m in range(MICRO_STEPS)]
    placed = hf.distribute(model)  # from here on a rank holds its own experts alone
    counts_MLGE = routed.gather_counts([trace for _, trace in rollouts])

    topology = Topology(num_ranks, ranks_per_node=num_ranks, redundant_slots=REDUNDANT_SLOTS, links=ONE_MACHINE)
    at_home = plan(counts_MLGE, topology, PlanOptions(replicas=False), home_LE=placed.home_LE)
    planned = plan(counts_MLGE, topology, home_LE=placed.home_LE)

    for name, step_plan in (("experts at home", at_home), ("planned", planned)):
        loss, executed_ML = run_step(routed, placed, rollouts, step_plan, counts_MLGE)
        busiest = busiest_over_mean(executed_ML, num_ranks)
        if rank == 0:
            print(f"{name:16}  rows of the busiest rank / mean {busiest:.3f}   loss {loss:.12f}", flush=True)
    dist.destroy_process_group()


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
    placed: ExpertParallelModel,
    rollouts: list[tuple[torch.Tensor, fr.RoutingTrace]],
    step_plan: StepPlan,
    counts_MLGE: np.ndarray,
) -> tuple[float, np.ndarray]:
    """Forward and backward of every micro-step: the loss over all ranks, and the rows that this one computed [M, L]."""
    total = torch.zeros((), dtype=torch.float64)
    with routed.execute(step_plan, counts_MLGE, [trace for _, trace in rollouts]) as execution:
        for sequences, trace in rollouts:
            with routed.replay(trace):
                # the last token is no input: nothing is predicted from it, and no router has seen it
                logits = routed.model(sequences[:, :-1], use_cache=False).logits
                logprobs = logits.log_softmax(-1).gather(-1, sequences[:, 1:, None])
                loss = -logprobs.sum()
                loss.backward()
            total += loss.detach()
    placed.sum_gradients()  # an optimizer's step would follow
    routed.model.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    return float(total), execution.executed_ML


def busiest_over_mean(executed_ML: np.ndarray, num_ranks: int) -> float:
    """Rows of the busiest rank over the mean, summed over micro-steps and layers: each is waited for by all ranks."""
    parts = [torch.empty(executed_ML.shape, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(parts, torch.from_numpy(executed_ML))
    executed_GML = torch.stack(parts).double()
    return float(executed_GML.amax(0).sum() / executed_GML.mean(0).sum())


if __name__ == "__main__":
    main()
