"""The patch for OpenRLHF, applied to the released OpenRLHF: its actor, under DeepSpeed, replays what vLLM recorded.

What vLLM answers goes through OpenRLHF's executor, samples, experience maker and replay buffer. Neither vLLM nor Ray
runs: a stand-in answers as vLLM's engine does, and Ray's actors are called as the classes that they are.
"""

import asyncio
import importlib.machinery
import os
import sys
import types
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if "FOREROUTE_PATCHES" not in os.environ:
    pytest.skip("OpenRLHF has an environment of its own: run `make night PART=patches`", allow_module_level=True)

import deepspeed

from examples.trl.tiny import tokenizer
from tests.patches import cuda_on_cpu
from tests.patches.forced import require_followed, routed_by, tiny
from tests.trainers.given_experts import differing, watched

PATCH = "openrlhf/upstream/router_replay.patch"
STEPS, VOCABULARY = 4, 258
PROMPTS, LENGTHS = ["a", "very long", "a prompt", "one"], [7, 9, 4, 8]
# in three layers, of the old-log-prob pass, of the update, and of its recomputation
ROWS = 3 * 3 * sum(len(prompt) + length - 1 for prompt, length in zip(PROMPTS, LENGTHS, strict=True))


@pytest.fixture(scope="module")
def openrlhf(tmp_path_factory):
    """OpenRLHF's package as it was released, and the patch applied."""
    folder = tmp_path_factory.mktemp("patched")
    cuda_on_cpu.patched("openrlhf", PATCH, folder)
    cuda_on_cpu.flash_attn()
    for name in ("vllm", "vllm.inputs", "vllm.utils"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["vllm.inputs"].TokensPrompt = sys.modules["vllm.utils"].random_uuid = None
    sys.modules["vllm"].SamplingParams, sys.modules["vllm"].__version__ = SimpleNamespace, "0.29.0"
    import openrlhf
    from openrlhf.utils import utils

    assert Path(openrlhf.__file__).is_relative_to(folder)
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # which a compiler would make for minutes
    utils.convert_to_torch_dtype = lambda _: torch.float32
    import_module("openrlhf.trainer.ppo_utils.replay_buffer")
    cuda_on_cpu.names_no_device("openrlhf.trainer.ppo_utils.replay_buffer")
    return openrlhf


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny(vocab_size=VOCABULARY).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def space(**values):
    return SimpleNamespace(**{k: space(**v) if isinstance(v, dict) else v for k, v in values.items()})


def policy(checkpoint, stage, replay):
    """OpenRLHF's policy actor, its DeepSpeed engine with torch's optimizer."""
    from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    ckpt = {"save_hf": False, "disable_ds": True, "path": "", "load_enable": False}
    ds = {"param_dtype": "fp32", "attn_implementation": "sdpa", "experts_implementation": None}
    ds |= {"lora": {"rank": 0, "alpha": 0, "target_modules": None, "dropout": 0}, "tensor_parallel_size": 1}
    ds |= dict.fromkeys(("load_in_4bit", "packing_samples", "use_liger_kernel", "enable_sleep"), False)
    train = {"micro_batch_size": 2, "ema_beta": 0.9, "max_epochs": 1, "colocate_all": True}
    train |= dict.fromkeys(("enable_ema", "dynamic_batch_enable", "async_enable", "colocate_actor_ref"), False)
    correction = {"level": "off", "mode": "mask", "gating": "ratio", "threshold": [0.5, 5.0]}
    advantage = {f"is_correction_{name}": value for name, value in correction.items()}
    actor = {"gradient_checkpointing_enable": True, "gradient_checkpointing_reentrant": False, "optim": "adam"}
    actor |= {"adam": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}, "muon": {}}
    actor |= {"lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "min_lr_ratio": 0.0, "max_norm": 1.0}
    actor |= {"eps_clip": 0.2, "eps_clip_low_high": [0.2, 0.2], "dual_clip": None, "loss_agg_mode": "token-mean"}
    actor |= {"policy_loss_type": "ppo", "aux_loss_coef": 0.0, "entropy_coef": None, "router_replay": replay}
    args = space(
        local_rank=-1,
        ckpt=ckpt,
        ds=ds,
        train=train,
        vllm={"sync_backend": "gloo"},
        rollout={"temperature": 1.0},
        data={"disable_fast_tokenizer": False},
        algo={"advantage": advantage, "kl": {"use_loss": False, "estimator": "k1"}},
        actor=actor,
    )
    strategy = DeepspeedStrategy(
        micro_train_batch_size=2, train_batch_size=4, zero_stage=stage, max_norm=1.0, args=args
    )
    configured = strategy.get_ds_train_config

    def with_torch_adam(*args, **kwargs):
        config = configured(*args, **kwargs)
        config.get("optimizer", {}).setdefault("params", {})["torch_adam"] = True
        return config

    strategy.get_ds_train_config = with_torch_adam
    actor_class = PolicyModelActor.__ray_metadata__.modified_class
    made = object.__new__(actor_class)
    made.init_model_from_pretrained(strategy, str(checkpoint), max_steps=STEPS)
    made.args = args
    return made


class Engine:
    """What OpenRLHF's executors ask: tokens drawn at random, and the routes of a bfloat16 copy a little off."""

    def __init__(self, model, seed):
        self._model = tiny(vocab_size=VOCABULARY).bfloat16()
        self._model.load_state_dict(weights_of(model))
        self._generator = torch.Generator().manual_seed(seed)
        self._lengths = iter(LENGTHS)
        self.routes = []  # of each answer

    async def generate(self, prompt, params, multi_modal_data=None):
        drawn = torch.randint(2, VOCABULARY, (next(self._lengths),), generator=self._generator).tolist()
        [routes] = routed_by(self._model, [prompt + drawn])
        self.routes.append(routes)
        completion = SimpleNamespace(
            token_ids=drawn, text="", finish_reason="stop", logprobs=None, routed_experts=routes.byte().numpy()
        )
        return SimpleNamespace(outputs=[completion])


def weights_of(engine):
    """Of DeepSpeed's engine, whole."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}


def samples(engine):
    """Experiences of one sequence each, as OpenRLHF's generator makes them, and their routes [T - 1, L, K]."""
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    params = SimpleNamespace(max_tokens=16, logprobs=None)
    generator = object.__new__(SamplesGenerator)
    made = []
    for prompt in PROMPTS:
        asked = SingleTurnAgentExecutor().execute(prompt, "", params, 64, tokenizer(), engine)
        answer = asyncio.run(asked) | {"reward": 1.0, "scores": 1.0}
        made.append(generator._process_response_into_experience(answer, max_len=64))
    return made, engine.routes


def with_logprobs(actor, batches):
    """What OpenRLHF's experience maker makes of samples: Ray's calls are made at once."""
    from openrlhf.trainer.ppo_utils import experience_maker

    class Group:
        def async_run_method_batch(self, method_name, **kwargs):
            count = len(kwargs["sequences"])
            return [actor.forward(**{name: values[i] for name, values in kwargs.items()}) for i in range(count)]

        def async_run_method(self, method_name):
            pass

    maker = object.__new__(experience_maker.RemoteExperienceMaker)
    maker.strategy, maker.actor_model_group = actor.strategy, Group()
    maker.critic_model_group = maker.initial_model_group = maker.reward_model_group = None
    ray = experience_maker.ray
    experience_maker.ray = SimpleNamespace(get=lambda value: value, put=lambda value: value)
    maker._flatten_results = lambda refs, _: [each[0] if isinstance(each, list) else each for each in refs]
    actor.args.ds.ring_attn_size = 1
    try:
        return maker.make_experience(batches)
    finally:
        experience_maker.ray = ray


@pytest.mark.parametrize(("stage", "replay"), [(2, True), (3, True), (2, False)])
def test_four_steps_on_the_routes_of_vllm(stage, replay, openrlhf, checkpoint):
    actor = policy(checkpoint, stage, replay)
    for number in range(STEPS):
        found, status = step(actor, number)
        require_followed(found, ROWS, replay, status.get("router_disagreement"))


def step(actor, number):
    """The rows of an old-log-prob pass and an update, and those that went to other experts; and the status."""
    from openrlhf.trainer.ppo_utils.experience import make_experience_batch, split_experience_batch

    made, routes = samples(Engine(actor.actor.model, number))
    with watched(actor.actor.model.module) as forwards:
        made = with_logprobs(actor, made)
        for sample in made:
            sample.advantages = sample.returns = torch.randn(sample.action_mask.shape) * sample.action_mask
            sample.info, sample.values = {}, None
        actor.append(make_experience_batch([each for sample in made for each in split_experience_batch(sample)]))
        status = actor.fit()
    by_tokens = {tuple(s.sequences[0].tolist()): ids.numpy() for s, ids in zip(made, routes, strict=True)}
    return differing(forwards, by_tokens), status
