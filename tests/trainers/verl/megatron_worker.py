"""What one of the ranks of verl's Megatron engine did in several runs, each with settings of `make` by its name."""

from pathlib import Path

# isort: off
from tests.trainers.verl.megatron_engines import exported, make, watched  # before verl: no GPU

# isort: on
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from foreroute.errors import ReplayError
from foreroute.trainers.verl.settings import MASKS
from tests.trainers.verl.verl_book import TEMPERATURE, Book, Scores
from tests.trainers.verl.verl_engines import mean_log_prob, old_log_probs, tensordict

SEQUENCES, STEPS = 16, 3
OF_MASKS = 8
"""Sequences whose tokens were drawn from sets."""


def train(policy, runs):
    """Settings are those of `run` too."""
    batch = Book(policy, count=SEQUENCES).batch()
    return each(runs, lambda **settings: run(policy, batch, **settings))


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
    recorded = None
    if settings.get("replay") == "R2":
        batch = {name: values for name, values in batch.items() if name != "routed_experts"}
    for step in range(STEPS):
        if step:  # what was sampled before the weights changed
            batch = {name: values for name, values in batch.items() if name != "rollout_log_probs"}
        with watched(engine) as old:
            log_probs, output = old_log_probs(engine, tensordict(batch, max_token_len_per_gpu=tokens))
        td = tensordict(batch, max_token_len_per_gpu=tokens)
        if settings.get("replay") == "R2":
            recorded = over_stages(output) if recorded is None else recorded
            td["routed_experts"] = recorded
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
