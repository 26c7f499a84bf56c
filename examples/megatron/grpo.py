"""GRPO on Megatron-Core with rollout routing replay, small enough to read from top to bottom.

    torchrun --nproc-per-node 2 examples/megatron/grpo.py                 # two expert-parallel ranks
    torchrun --nproc-per-node 2 examples/megatron/grpo.py --pipeline 2    # two pipeline stages

The policy learns to answer with even tokens. Its rollout engine is a copy of it in bfloat16, which flips experts now
and then, as another engine would. Every step prints how far the trainer is from the engine on its own routes, and on
the engine's; and the rows of the slowest expert-parallel rank over the mean, with every expert at home, by the plan,
and as its experts counted them.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from foreroute.testing import megatron_on_cpu

megatron_on_cpu.install()  # a machine with GPUs needs neither this nor megatron_on_cpu.CONFIG

from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from foreroute import layout
from foreroute.adapters import megatron
from foreroute.adapters.megatron import RoutedMegatron
from foreroute.costs import hardware_preset
from foreroute.mismatch import routing_mismatch, token_mismatch
from foreroute.planner import plan

VOCABULARY, PROMPT, WIDTH, GROUP, GROUPS = 32, 4, 16, 8, 4
"""Tokens; positions of a prompt, and of all; answers to a prompt; prompts of a rank and step, each a micro-batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages; the other ranks share the experts")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    experts = dist.get_world_size() // arguments.pipeline
    mpu.initialize_model_parallel(
        pipeline_model_parallel_size=arguments.pipeline,
        expert_model_parallel_size=experts,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(1 + mpu.get_pipeline_model_parallel_rank())
    model = build_model(arguments.pipeline, experts, torch.float32)
    engine = build_model(arguments.pipeline, experts, torch.bfloat16)
    routed, routed_engine = megatron.attach(model), megatron.attach(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(arguments.steps):
        engine.load_state_dict(model.state_dict())
        batches, trace = rollout(engine, routed_engine, seed=step, version=step)
        metrics = recompute(model, routed, batches, trace)
        metrics |= update(model, routed, optimizer, batches)
        if mpu.is_pipeline_last_stage() and mpu.get_data_parallel_rank() == 0:
            print(f"step {step}: " + ", ".join(f"{name} {value:.3g}" for name, value in metrics.items()), flush=True)
    dist.destroy_process_group()


def rollout(engine: Any, routed: RoutedMegatron, *, seed: int, version: int) -> tuple[list[dict[str, Any]], Any]:
    """Sampled answers by group, with the engine's log-probabilities, and the trace of their routes."""
    generator = torch.Generator().manual_seed(1000 * seed + mpu.get_data_parallel_rank())
    prompts = torch.randint(0, VOCABULARY, (GROUPS, 1, PROMPT), generator=generator).expand(-1, GROUP, -1)
    tokens = F.pad(prompts, (0, WIDTH - PROMPT)).clone()
    for t in range(PROMPT, WIDTH):
        logits = run(engine, [{"tokens": each, "sample": True} for each in tokens], forward_step, forward_only=True)
        if logits:
            chances = torch.stack(logits)[:, :, t - 1].float().softmax(-1)
            tokens[:, :, t] = torch.multinomial(chances.flatten(0, 1), 1, generator=generator).view(GROUPS, GROUP)
        dist.broadcast(tokens, mpu.get_pipeline_model_parallel_last_rank(), mpu.get_pipeline_model_parallel_group())
    batches = [{"tokens": each} for each in tokens]
    with routed.record(weight_version=version) as recording:
        logprobs = run(engine, batches, forward_step, forward_only=True)
    for batch, each in zip(batches, logprobs, strict=False):  # on the last stage
        batch["engine"] = each
    return batches, recording.trace()


def recompute(model: Any, routed: RoutedMegatron, batches: list[dict[str, Any]], trace: Any) -> dict[str, float]:
    """Gives each batch its routes and old log-probabilities; says how far trainer and engine are apart."""
    with routed.record() as recording:
        native = run(model, batches, forward_step, forward_only=True)
    own = recording.trace()
    for number, batch in enumerate(batches):
        routes = trace.select(range(number * GROUP, (number + 1) * GROUP))
        # cut to this rank's rows and layers: what waits for its turn is small
        batch["routes"] = routed.shard(routes, layout.pad(routes.lengths, side="right", order="sbhd"))
    old = run(model, batches, routed.replaying(forward_step), forward_only=True)
    if not old:
        return {}
    for batch, logprobs in zip(batches, old, strict=True):
        rewards = (batch["tokens"][:, PROMPT:] % 2 == 0).float().mean(1)
        batch |= {"old": logprobs, "rewards": rewards}
        batch["advantages"] = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    engine = torch.stack([batch["engine"] for batch in batches])
    return {
        "reward": float(torch.stack([batch["rewards"] for batch in batches]).mean()),
        "k3 on own routes": token_mismatch(torch.stack(native).flatten(), engine.flatten()).k3,
        "k3 on the engine's": token_mismatch(torch.stack(old).flatten(), engine.flatten()).k3,
        "routes that differ": routing_mismatch(trace, own).differing_share,
    }


def update(model: Any, routed: RoutedMegatron, optimizer: Any, batches: list[dict[str, Any]]) -> dict[str, float]:
    """Two optimizer steps of the clipped policy gradient; micro-batches replay what they carry, served by a plan."""
    forward = routed.replaying(forward_step)
    routes = [batch["routes"] for batch in batches]
    counts_MLGE = routed.gather_counts(routes)
    topology = hardware_preset("h100").topology(counts_MLGE.shape[2], redundant_slots=2)
    planned = plan(counts_MLGE, topology, home_LE=routed.home_LE)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        with routed.execute(planned, counts_MLGE, routes) as execution:
            run(model, batches, forward)
        for parameter in model.parameters():
            if parameter.grad is not None:
                is_dense = getattr(parameter, "allreduce", True)
                group = mpu.get_data_parallel_group() if is_dense else mpu.get_expert_data_parallel_group()
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= mpu.get_data_parallel_world_size()
        optimizer.step()
    return loads(routed, execution, counts_MLGE)


def loads(routed: RoutedMegatron, execution: Any, counts_MLGE: Any) -> dict[str, float]:
    """The slowest rank's rows over the mean, added up over the cells of this pipeline stage."""
    here = [routed.spec.layers.index(layer) for layer in routed.layers]
    rows_GML = [torch.zeros(execution.executed_ML.shape, dtype=torch.int64) for _ in range(counts_MLGE.shape[2])]
    dist.all_gather(rows_GML, torch.from_numpy(execution.executed_ML), group=mpu.get_expert_model_parallel_group())
    loads_MLE = counts_MLGE.sum(2)
    at_home_GML = np.stack([(loads_MLE * (routed.home_LE == rank)).sum(2) for rank in range(len(rows_GML))])
    mean = counts_MLGE[:, here].sum() / len(rows_GML)
    return {
        "slowest rank at homes": at_home_GML.max(0)[:, here].sum() / mean,
        "planned": execution.plan.max_load_ML[:, here].sum() / mean,
        "executed": float(torch.stack(rows_GML).amax(0)[:, here].sum()) / mean,
    }


def forward_step(batches: Any, model: Any) -> tuple[Tensor, Any]:
    """What Megatron's schedules call for each micro-batch. It knows nothing of replay."""
    batch = next(batches)
    tokens = batch["tokens"]
    positions = torch.arange(WIDTH).expand_as(tokens)
    ahead = torch.ones(WIDTH, WIDTH, dtype=torch.bool).triu(1)[None, None]
    output = model(tokens, positions, ahead, labels=None if "sample" in batch else tokens.roll(-1, 1))

    def loss(output: Tensor) -> tuple[Tensor, Tensor]:
        if "sample" in batch:
            return output.sum(), output.detach()
        logprobs = -output[:, PROMPT - 1 : -1]
        if "advantages" not in batch:
            return logprobs.mean(), logprobs.detach()
        ratio, advantages = (logprobs - batch["old"]).exp(), batch["advantages"][:, None]
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -gain.mean(), logprobs.detach()

    return output, loss


def run(model: Any, batches: list[dict[str, Any]], forward: Any, *, forward_only: bool = False) -> list[Tensor]:
    """All micro-batches through Megatron's schedule; what the loss reported of each, on the last stage."""
    reported: list[Tensor] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=WIDTH,
        micro_batch_size=GROUP,
        forward_only=forward_only,
    )
    return reported


def build_model(pipeline: int, experts: int, precision: torch.dtype) -> Any:
    config = TransformerConfig(
        **{**megatron_on_cpu.CONFIG, "params_dtype": precision, "pipeline_dtype": precision},
        num_layers=4,
        hidden_size=64,
        init_method_std=0.15,
        num_attention_heads=4,
        ffn_hidden_size=128,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=experts,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=VOCABULARY,
        max_sequence_length=WIDTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
    )
    return model.to(precision).train()


if __name__ == "__main__":
    main()
