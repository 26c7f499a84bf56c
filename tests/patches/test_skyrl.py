"""The patch for SkyRL's FSDP backend, applied to the released SkyRL: its policy worker replays what a rollout recorded.

Batches are made by SkyRL from nested lists of routes, as its generator hands them over. Ray starts nothing here: the
worker is the class that Ray would run, in one process.
"""

import os
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typing_extensions

if "FOREROUTE_PATCHES" not in os.environ:
    pytest.skip("SkyRL has an environment of its own: run `make night PART=patches`", allow_module_level=True)

from tests.patches import cuda_on_cpu
from tests.patches.forced import require_followed, routed_by, tiny
from tests.trainers.given_experts import differing, watched

PATCH = "skyrl/upstream/fsdp_router_replay.patch"
STEPS = 4
PROMPTS, RESPONSES = [5, 3, 6, 4], [7, 9, 4, 8]


@pytest.fixture(scope="module")
def skyrl(tmp_path_factory):
    """SkyRL's package as it was released, and the patch applied."""
    folder = tmp_path_factory.mktemp("patched")
    cuda_on_cpu.patched("skyrl", PATCH, folder)
    typing.TypedDict = typing_extensions.TypedDict  # as pydantic asks for before Python 3.12
    cuda_on_cpu.flash_attn()
    import skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker as workers

    assert Path(workers.__file__).is_relative_to(folder)
    return workers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny().save_pretrained(folder)
    return folder


def worker(skyrl, checkpoint, replay):
    from skyrl.train.config import TrainerConfig
    from skyrl.train.config.config import MixedPrecisionConfig

    config = TrainerConfig(
        strategy="fsdp", flash_attn=False, remove_microbatch_padding=False, micro_train_batch_size_per_gpu=2
    )
    config.micro_forward_batch_size_per_gpu = 2
    config.algorithm.temperature = 1.0
    config.algorithm.use_kl_loss = False
    config.policy.model.path = str(checkpoint)
    config.policy.optimizer_config.lr = 1e-3
    config.policy.optimizer_config.num_warmup_steps = 0
    config.policy.fsdp_config.mixed_precision = MixedPrecisionConfig(param_dtype="fp32")
    config.policy.fsdp_config.moe_enable_routing_replay = replay
    one = {"world_size": 1, "rank": 0, "local_rank": 0, "sequence_parallel_size": 1}
    made = skyrl.FSDPPolicyWorkerBase(cfg=config, master_addr="127.0.0.1", master_port=1, **one)
    made.init_worker_process_group()
    made.init_model(str(checkpoint), num_training_steps=STEPS)
    return made


def rollout(model, step):
    """What SkyRL's trainer makes of a generator's answer: tokens of an engine whose routers are a little off."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    generator = torch.Generator().manual_seed(step)
    engine = tiny().bfloat16()
    engine.load_state_dict(weights_of(model))
    prompts, responses = (
        [torch.randint(2, 64, (length,), generator=generator).tolist() for length in lengths]
        for lengths in (PROMPTS, RESPONSES)
    )
    routes = routed_by(engine, [p + r for p, r in zip(prompts, responses, strict=True)])
    ones = [[1] * length for length in RESPONSES]
    made = convert_prompts_responses_to_batch_tensors(
        SimpleNamespace(pad_token_id=0), prompts, responses, [[1.0] * n for n in RESPONSES], ones, None,
        [ids.tolist() for ids in routes],
    )  # fmt: skip
    tokens, mask, response_mask, _, loss_mask, _, indices = made
    assert indices.dtype == torch.uint8
    of_responses = {"response_mask": response_mask, "loss_mask": loss_mask, "rollout_logprobs": None}
    of_responses["advantages"] = torch.randn(loss_mask.shape, generator=generator)
    of_tokens = {"sequences": tokens, "attention_mask": mask, "rollout_expert_indices": indices}
    batch = TrainingInputBatch(of_tokens | of_responses)
    batch.metadata = {"response_length": loss_mask.shape[1]}
    return batch, {(*p, *r): ids.numpy() for p, r, ids in zip(prompts, responses, routes, strict=True)}


def weights_of(model):
    tensors = model.state_dict()
    return {name: getattr(each, "full_tensor", lambda each=each: each)().clone() for name, each in tensors.items()}


def step(actor, batch, routes):
    """The rows of an old-log-prob pass and an update, and those that went to other experts; and the metrics."""
    with watched(actor.model.model) as forwards:
        old = actor.forward(batch)
        batch["action_log_probs"] = torch.tensor([each["logprobs"] for each in old.loss_fn_outputs])
        updated = actor.forward_backward(batch)
    actor.optim_step()
    return differing(forwards, routes), updated.metrics


@pytest.mark.parametrize("replay", [True, False])
def test_four_steps_on_the_routes_of_the_rollout(replay, skyrl, checkpoint):
    actor = worker(skyrl, checkpoint, replay)
    # in three layers, of the old-log-prob pass, of the update, and of its recomputation
    rows = 3 * 3 * (sum(PROMPTS + RESPONSES) - len(PROMPTS))
    for number in range(STEPS):
        found, metrics = step(actor, *rollout(actor.model.model, number))
        require_followed(found, rows, replay, metrics.get("router_replay/native_disagreement"))
