"""TRL's distillers with R3 of the student: experts are given the rollout's routes in every step, and without it not."""

from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from packaging.version import Version

if find_spec("trl") is None or Version(version("trl")) < Version("1.16"):
    pytest.skip("the distillers are those of TRL 1.16", allow_module_level=True)

import trl
from trl.experimental import gkd
from trl.trainer import distillation_trainer

from examples.trl import distill_r3
from examples.trl.tiny import chat_tokenizer, policy
from tests.patches.forced import put_off
from tests.trainers.given_experts import differing, drawn_anew, watched
from tests.trainers.trl import vllm_fakes


@pytest.fixture(scope="module", autouse=True)
def _no_group_left():
    """DistillationTrainer with vLLM opens one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


SETTINGS = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "use_cpu": True,
    "bf16": False,
    "activation_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}
TEXTS = [f"{'very ' * (i % 3)}many vowels {i}" for i in range(32)]


def writing_down(model, known):
    """The model, whose `generate` writes down what its experts were given."""
    sample = model.generate

    def generate(input_ids, attention_mask, **kwargs):
        with watched(model) as forwards:
            output = sample(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        # along a cache the forwards are parts, without one the last has all of it
        parts = forwards if forwards[-1].ids.shape[1] == 1 else forwards[-1:]
        shaped = [part.ids_LRK().transpose(1, 0, 2).reshape(*part.ids.shape, 3, -1) for part in parts]
        routes = np.concatenate(shaped, axis=1)
        all_tokens = output if isinstance(output, torch.Tensor) else output.sequences
        for prompt_mask, tokens, ids in zip(attention_mask.bool(), all_tokens, routes, strict=True):
            first = int(prompt_mask.int().argmax())
            ends = (tokens[len(prompt_mask) :] == 1).nonzero()[:1].flatten()
            last = len(prompt_mask) + int(ends[0]) + 1 if len(ends) else len(tokens)
            known[tuple(tokens[first:last].tolist())] = ids[first : last - 1]
        return output

    model.generate = generate
    return model


class Engine:
    """A bfloat16 copy of who samples, its routers a little off."""

    def __init__(self, known):
        self.known = known

    def __call__(self, model):
        engine = policy().bfloat16()
        engine.load_state_dict(model.state_dict())
        return writing_down(put_off(engine), self.known)


class Native(distill_r3.GKDTrainer):
    """The control: it forgets the rollout's routes."""

    def compute_loss(self, *args, **kwargs):
        self._rollout = None
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("trainer_class", [distill_r3.GKDTrainer, pytest.param(Native, marks=pytest.mark.slow)])
def test_gkd_trains_the_student_on_the_routes_of_its_rollout(trainer_class, tmp_path):
    model, routes = policy(), {}
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "aeiou"}] for text in TEXTS]
    trainer = trainer_class(
        model=model,
        teacher_model=policy(seed=1),
        args=gkd.GKDConfig(max_new_tokens=8, lmbda=1.0, output_dir=tmp_path, **SETTINGS),
        processing_class=chat_tokenizer(),
        train_dataset=Dataset.from_dict({"messages": chats}),
        samples_for=Engine(routes),
    )
    with watched(model) as forwards:
        trainer.train()
    require_followed(forwards, routes, trainer_class is not Native)


def require_followed(forwards, routes, replays):
    rows, others = differing([forward for forward in forwards if forward.grad], routes)
    assert rows > 1000
    assert others == 0 if replays else others > 0.02 * rows


@pytest.mark.slow
def test_distillation_trains_on_the_routes_that_vllm_returned(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_fakes.Sampler, "sample", of_vllm(vllm_fakes.Sampler.sample, known := {}))
    vllm_fakes.colocated(monkeypatch)
    monkeypatch.setattr(distillation_trainer, "is_vllm_available", lambda: True)
    for trainer_class in (distill_r3.DistillationTrainer, trl.DistillationTrainer):
        model = policy()
        config = SETTINGS | vllm_fakes.COLOCATE | {"max_completion_length": 8}
        trainer = trainer_class(
            model=model,
            teacher_model=policy(seed=1),
            args=trl.DistillationConfig(output_dir=tmp_path, **config),
            processing_class=chat_tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": TEXTS}),
        )
        with watched(model) as forwards:
            trainer.train()
        require_followed(forwards, known, trainer_class is distill_r3.DistillationTrainer)


def of_vllm(sample, known):
    """Routes in which a sixth of the picks was drawn anew, as of an engine that chose otherwise."""

    def wrapped(sampler, prompts, **kwargs):
        sampled = sample(sampler, prompts, **kwargs)
        rng = np.random.default_rng(len(sampled[0][3]))
        sampled = [(*each[:3], drawn_anew(each[3], 1 / 6, rng), each[4]) for each in sampled]
        for prompt, response, _, routes, _ in sampled:
            known[(*prompt, *response)] = routes.astype(np.int64)
        return sampled

    return wrapped
