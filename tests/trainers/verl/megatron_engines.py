"""verl's Megatron engine, as it was released, on a CPU. Importing this makes the process one without a GPU."""

# isort: off
from examples.verl import verl_on_cpu  # noqa: F401  before verl
from examples.verl import megatron_on_cpu  # noqa: F401  before foreroute's engine

# isort: on
from contextlib import contextmanager

from verl.models.mcore import model_forward_fused
from verl.trainer.config import CheckpointConfig
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits
from verl.workers.config import EngineRouterReplayConfig, HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import EngineRegistry

import foreroute.trainers.verl.megatron  # noqa: F401  what external_lib does
import tests.trainers.verl.flex_kernels  # noqa: F401
from examples.verl.demo_cluster import FUSED_KERNELS
from foreroute.trainers.verl.planning import PlanningMegatronConfig


def linear_cross_entropy(hidden, weight, labels, temperature=1.0, reduction="none", group=None):
    """What the fused kernel gives, a Triton one: verl's own way to the same, of logits."""
    logits = (hidden.reshape(-1, hidden.shape[-1]) @ weight.T).float() / temperature
    entropy_N = vocab_parallel_entropy(logits.clone())
    return vocab_parallel_log_probs_from_logits(logits, labels.reshape(-1)), entropy_N


model_forward_fused.linear_cross_entropy = linear_cross_entropy

_check_config = McoreEngineConfig.__post_init__


def check_config(config):
    """verl accepts types of 16 bits alone, which tell little from rounding."""
    dtype, vars(config)["dtype"] = config.dtype, "bfloat16"
    _check_config(config)
    vars(config)["dtype"] = dtype


McoreEngineConfig.__post_init__ = check_config


def make(folder, *, plans=False, replay="R3", transformer=None, model=None, **settings):
    """An engine, initialised, whose experts two ranks share. Settings are of verl's configuration and its model's."""
    config = {
        "vanilla_mbridge": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "router_replay": EngineRouterReplayConfig(mode=replay),
        "override_transformer_config": {
            **dict.fromkeys(FUSED_KERNELS, False),
            "use_cpu_initialization": True,
            **(transformer or {}),
        },
        **settings,
    }
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatron",
        model_config=HFModelConfig(path=folder, **(model or {})),
        engine_config=(PlanningMegatronConfig if plans else McoreEngineConfig)(**config),
        optimizer_config=McoreOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def exported(engine):
    """All weights by the names of Hugging Face, on every rank."""
    return {name: weight.detach().float().clone() for name, weight in engine.get_per_tensor_param()[0]}


@contextmanager
def watched(engine):
    """What routers hand on while the context is open: layer -> a list of bool [N, E], one for each forward."""
    routed, handles = {}, []
    blocks = [module for chunk in engine.module for module in chunk.modules() if hasattr(module, "router")]
    for layer, block in enumerate(blocks):
        seen = routed[layer] = []

        def note(_, args, out, seen=seen):
            seen.append(out[1].reshape(-1, out[1].shape[-1]).clone())

        handles.append(block.router.register_forward_hook(note))
    yield routed
    for handle in handles:
        handle.remove()
