"""verl's Megatron engine, as it was released, on a CPU, and what one of its ranks did in several runs.

Importing this makes the process one without a GPU. Runs have settings of `make`, or of the function, by their names.
"""

# isort: off
from examples.verl import verl_on_cpu  # noqa: F401  before verl
from examples.verl import megatron_on_cpu  # noqa: F401  before foreroute's engine

# isort: on
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from verl.models.mcore import model_forward_fused
from verl.trainer.config import CheckpointConfig
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits
from verl.workers.config import EngineRouterReplayConfig, HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import EngineRegistry

import foreroute.trainers.verl.megatron  # noqa: F401  what external_lib does
import tests.trainers.verl.flex_kernels  # noqa: F401
from examples.verl.demo_cluster import FUSED_KERNELS
from foreroute.errors import ReplayError
from foreroute.trainers.verl.planning import PlanningMegatronConfig
from foreroute.trainers.verl.settings import MASKS
from tests.trainers.verl.verl_book import TEMPERATURE, Book, Scores
from tests.trainers.verl.verl_engines import mean_log_prob, old_log_probs, tensordict

SEQUENCES, OF_MASKS, STEPS = 16, 8, 3
LAYERS = 4
TENSOR, CONTEXT, PIPELINE = ({f"{form}_parallel_size": 2} for form in ("tensor_model", "context", "pipeline_model"))


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
    unfused = dict.fromkeys(FUSED_KERNELS, False) | {"use_cpu_initialization": True}
    config = {
        "vanilla_mbridge": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "router_replay": EngineRouterReplayConfig(mode=replay),
        "override_transformer_config": unfused | (transformer or {}),
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


def train(policy, runs):
    return each(runs, partial(run, policy, Book(policy, count=SEQUENCES).batch()))


def each(runs, run):
    results = {}
    for name, settings in runs.items():
        results[name] = run(**settings)
        mpu.destroy_model_parallel()  # the next run has other ranks
    return results


def share_of(batch):
    """The sequences of this rank, and the number of the first."""
    share = len(batch["input_ids"]) // mpu.get_data_parallel_world_size()
    first = share * mpu.get_data_parallel_rank()
    return {name: values[first : first + share] for name, values in batch.items()}, first


def run(policy, batch, *, tokens=32, reverse=False, resumes=False, **settings):
    """Steps of an old-log-prob pass and an update each; resumed, by a new engine from the second on.

    Under R2 all updates are on what the first old-log-prob pass recorded.
    """
    engine = make(policy, **settings)
    found = {name: [] for name in ("log_probs", "metrics", "old", "update")}
    batch, found["first"] = share_of(batch)
    if reverse:
        batch = {name: values.flip(0) for name, values in batch.items()}
    recorded, is_r2 = None, settings.get("replay") == "R2"
    if is_r2:
        del batch["routed_experts"]
    for step in range(STEPS):
        if step == 1:  # what was sampled before the weights changed
            del batch["rollout_log_probs"]
        with watched(engine) as old:
            log_probs, output = old_log_probs(engine, tensordict(batch, max_token_len_per_gpu=tokens))
        td = tensordict(batch, max_token_len_per_gpu=tokens)
        if is_r2:
            td["routed_experts"] = recorded = over_stages(output) if recorded is None else recorded
        with watched(engine) as updated, engine.train_mode():
            output = engine.train_batch(td, loss_function=sum_log_prob)
        found["log_probs"].append([row.float() for row in log_probs])
        found["metrics"].append(output.get("metrics"))
        found["old"].append(old)
        found["update"].append(updated)
        if resumes and step == 0:
            checkpoint = str(Path(policy).with_name("checkpoint"))
            engine.save_checkpoint(checkpoint, global_step=1)
            dist.barrier()
            engine = make(policy, **settings)
            engine.load_checkpoint(checkpoint, del_local_after_load=False)
    return found | {"weights": exported(engine)}


def sum_log_prob(model_output, data, dp_group):
    """The same over all data, however many ranks share it, between which gradients are averaged."""
    loss, metrics = mean_log_prob(model_output, data, dp_group)
    return loss * dist.get_world_size(dp_group), metrics


def over_stages(output):
    """The routes that the last stage of a pipeline has of an old-log-prob pass, as verl hands them on to all."""
    routes = [output["model_output"]["routed_experts"] if output else None]
    last = mpu.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(routes, last, group=mpu.get_pipeline_model_parallel_group())
    return routes[0]


def score(policy, runs):
    """Log-probs and gradients on sampling masks of each run, or what it was refused with."""
    scores, model = Scores(policy, count=OF_MASKS), {"external_lib": MASKS}

    def scored(**settings):
        engine = make(policy, dtype="float32", use_distributed_optimizer=False, model=model, **settings)
        batch, first = share_of(scores.batch())
        td = tensordict(batch, temperature=TEMPERATURE)
        try:
            log_probs, _ = old_log_probs(engine, td)
        except ReplayError as error:
            return {"refused": str(error)}
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(td, loss_function=sum_log_prob)
            for parameter in (each for chunk in engine.module for each in chunk.parameters()):
                parameter.data.copy_(parameter.main_grad)
        return {
            "first": first,
            "log_probs": log_probs,
            "k3": (output.get("metrics") or {}).get("mismatch/k3", []),
            "gradients": {name: each.detach().clone() for name, each in engine.bridge.export_weights(engine.module)},
        }

    return each(runs, scored)
