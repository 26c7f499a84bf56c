"""The models of a run: the policy, the reference that it is held close to, and the engine that samples."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foreroute.adapters import hf
from foreroute.adapters.checkpoint import ModelWriter, ServedModel
from foreroute.capture import Generation
from foreroute.engines import vllm
from foreroute.engines.base import Engine
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import AttachError, ConfigError, RunFolderError
from foreroute.train.config import ModelConfig, TrainConfig
from foreroute.train.passes import Stage, sampled_logprobs
from foreroute.train.ranks import CPU
from foreroute.train.run_folder import RunFolder, misfit_named
from foreroute.train.tasks import Task


def make_model(config: ModelConfig, task: Task, seed: int, device: torch.device = CPU) -> Any:
    """Make a model with its first weights, on the CPU: a seed gives the same ones on every device.

    Raises:
        ConfigError: when transformers cannot make or load it, or it has no embedding for a token of the task.
    """
    if config.path is None:
        model = hf.build_model(
            str(config.family),
            seed=seed,
            experts_implementation=config.experts_implementation,
            **{**config.sizes, "vocab_size": task.vocabulary_size},
        )
        return in_dtype(model.to(device), config)
    model = hf.load_pretrained(Path(config.path), experts_implementation=config.experts_implementation)
    _require_embeddings(model, config, task)
    return in_dtype(model.to(device), config)


def make_policy(config: TrainConfig, task: Task, device: torch.device = CPU) -> hf.RoutedTransformer:
    """Make the policy, with initial weights, ready to record and replay.

    Raises:
        ConfigError: when it cannot be had, or has no routers that can be recorded and replayed.
    """
    model = make_model(config.model, task, config.seed, device)
    if config.model.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"{config.model.family} has no activation checkpointing; set model.gradient_checkpointing = false"
            )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    to_training(model)
    try:
        return hf.attach(model)
    except AttachError as error:
        raise ConfigError(
            f"the model of {config.model.path or config.model.family} cannot be trained: {error}"
        ) from error


def to_training(model: Any) -> None:
    """Put a model into training mode, in place, without what would draw random numbers: dropout, and noise of routers.

    Updates then compute what the rollout's engine did, and a step that runs again comes out as before.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and name.endswith("dropout"):
                setattr(module, name, 0.0)
        if any(name.endswith("jitter_noise") for name in vars(module)):
            # it also sets which logits PhiMoE looks at, so that it stays, and the router alone is not in training
            module.training = False


def trainable(config: TrainConfig, policy: hf.RoutedTransformer) -> hf.RoutedTransformer:
    """Change the policy in place: add adapters if there are to be some, and gradients where RL changes weights."""
    lora = config.model.lora
    if lora.rank:
        hf.add_lora(policy.model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=config.seed)
        policy = hf.attach(policy.model)
    if lora.rank or config.rl.router == "frozen":
        for parameter in policy.router_parameters():
            parameter.requires_grad_(config.rl.router == "trained")
    return policy


def write_model(model: Any, weights: Mapping[str, Tensor], task: Task, folder: Path) -> None:
    """Write a Hugging Face folder: configuration, weights, and the task's tokenizer."""
    ModelWriter(model).write(folder, weights)
    task.save_tokenizer(folder)


def _require_embeddings(model: Any, config: ModelConfig, task: Task) -> None:
    embeddings = model.get_input_embeddings().num_embeddings
    if task.vocabulary_size > embeddings:
        raise ConfigError(
            f"the tokenizer in {config.tokenizer_folder} has {task.vocabulary_size} tokens, the model in {config.path} "
            f"embeds {embeddings}; name the tokenizer that the model was trained with as model.tokenizer"
        )


def in_dtype(model: Any, config: ModelConfig) -> Any:
    """Convert parameters to `config.dtype`. Their gradients are float32, so that they add up over micro-steps.

    Buffers, such as the frequencies of positions and the biases of routers, stay as they are.

    Raises:
        ConfigError: where torch cannot keep gradients in float32.
    """
    if config.dtype == "float32":
        return model
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise ConfigError(
            f'model.dtype = "{config.dtype}" needs a torch that keeps gradients in float32 (Tensor.grad_dtype), and '
            f"{torch.__version__} does not; install the torch of constraints.txt"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
        parameter.grad_dtype = torch.float32
    return model


class Reference:
    """A frozen model. It routes for itself: neither the rollout's routes nor the policy's are replayed on it."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def logprobs_R(self, generation: Generation, stage: Stage, temperature: float) -> NDArray[np.float32]:
        """Compute float32 [R] of the response tokens of all sequences, in micro-steps of `stage`, in their order."""
        parts = [sampled_logprobs(self._model, generation.select(part), temperature) for part in stage.micro_steps]
        return stage.in_order([part.cpu().numpy() for part in parts], generation.response_lengths)


def load_reference(config: TrainConfig, task: Task, run: RunFolder, device: torch.device) -> Reference:
    """Load the reference of a run, new or resumed: the weights of its first checkpoint.

    Raises:
        RunFolderError: when that is gone or damaged.
    """
    first = run.path / "checkpoints" / "step-000000.safetensors"
    if not first.exists():
        raise RunFolderError(
            f"{first} does not exist; rl.kl_coefficient needs the weights that the run began with. Restore the file"
        )
    model = make_model(config.model, task, seed=0, device=device)
    weights = run.load(first).state["model"]
    with misfit_named(f"checkpoint {first}"):
        model.load_state_dict(hf.without_lora(weights))
    return Reference(model)


def make_engine(run: TrainConfig, policy: hf.RoutedTransformer) -> Engine:
    """Start or reach the engine; the caller closes it.

    Raises:
        EngineError: when there is no vLLM to run, or its server does not answer.
    """
    config = run.rollout
    place = config.vllm
    if config.engine == "embedded":
        return EmbeddedEngine(
            policy.model,
            config.precision,
            gate_weights=run.rl.routing == "R3+weights",
            indexers=policy.indexers is not None and run.rl.routing in ("R3", "R3+weights"),
        )
    if policy.indexers is not None and run.rl.routing == "R3":
        warnings.warn(
            "the policy has indexers of sparse attention, and vLLM returns none of their choices: routes alone are "
            'replayed, and queries attend to other units than in the rollout. rollout.engine = "embedded" records both',
            stacklevel=2,
        )
    if place.mode == "process":
        settings = vllm.ProcessSettings(
            python=Path(str(place.python)),  # TrainConfig refuses a process without
            precision=config.precision,
            max_model_len=place.max_model_len,
            timeout_s=place.timeout_s,
            sampling_masks=config.truncates,
            options=place.options,
        )
        return vllm.ProcessEngine(ServedModel.of(policy), settings)
    # TrainConfig refuses a server without url and folder
    url, folder = str(place.url), Path(str(place.weights_folder))
    return vllm.VLLMServerEngine(ServedModel.of(policy), url, weights_folder=folder, timeout_s=place.timeout_s)
