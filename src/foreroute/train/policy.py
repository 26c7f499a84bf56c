"""The policy: where its weights come from, and how one process executes it.

`experts.py` has the execution of several ranks, on which all of them make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from foreroute.adapters import hf
from foreroute.adapters.checkpoint import ServedModel
from foreroute.adapters.hf.loading import build_spread, load_pretrained, spread_over
from foreroute.adapters.hf.trace_rows import TraceRows
from foreroute.engines.base import Engine
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import AttachError, ConfigError
from foreroute.records.step_record import ExecutionRecord
from foreroute.trace import RoutingTrace
from foreroute.train.chain import Task
from foreroute.train.config import ModelConfig, TrainConfig

CPU = torch.device("cpu")
BETAS = (0.9, 0.99)
"""Decay of AdamW's moments in RL. Weights do not decay."""
T = TypeVar("T")


def make_policy(config: TrainConfig, task: Task, device: torch.device = CPU) -> hf.RoutedTransformer:
    """Make the policy, ready to record and replay, or raise `ConfigError`.

    Over several ranks it is spread, in a collective call; weights of a new model come later, from rank 0.
    """
    model = make_model(config.model, task, config.seed, num_ranks=config.parallel.expert).to(device)
    if config.model.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"{config.model.source} has no activation checkpointing; set model.gradient_checkpointing = false"
            )
        checkpoint_activations(model)
    to_training(model)
    try:
        return hf.attach(model)
    except AttachError as error:
        raise ConfigError(f"the model of {config.model.source} cannot be trained: {error}") from error


def make_model(config: ModelConfig, task: Task, seed: int, *, num_ranks: int = 1) -> Any:
    """Make a model with its first weights, float32 on the CPU; over several ranks, spread, and a new one without."""
    # on the CPU, so that a seed gives the same weights for every device
    experts_implementation = config.experts_implementation
    if config.path is None:
        family, sizes = config.source, {**config.sizes, "vocab_size": task.vocabulary_size}
        if num_ranks > 1:
            return build_spread(family, num_ranks=num_ranks, experts_implementation=experts_implementation, **sizes)
        return hf.build_model(family, seed=seed, experts_implementation=experts_implementation, **sizes)
    model = load_pretrained(
        Path(config.path),
        experts_implementation=experts_implementation,
        distributed_config=spread_over(num_ranks) if num_ranks > 1 else None,
    )
    embeddings = model.get_input_embeddings().num_embeddings
    if task.vocabulary_size > embeddings:
        raise ConfigError(
            f"the tokenizer in {config.tokenizer_folder} has {task.vocabulary_size} tokens, the model in {config.path} "
            f"embeds {embeddings}; name the tokenizer that the model was trained with as model.tokenizer"
        )
    return model


def checkpoint_activations(model: Any) -> None:
    """Have backward compute the activations of each layer anew."""
    # older transformers have the second name alone
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})


def to_training(model: Any) -> None:
    """Put a model into training mode, in place, without what draws random numbers: dropout, noise of routers."""
    # updates then compute what the rollout's engine did, and repeating a step gives the same result
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


def make_engine(run: TrainConfig, policy: hf.RoutedTransformer) -> Engine:
    """Start the engine, or raise `ConfigError` or `EngineError`; the caller closes it."""
    config, server = run.rollout, run.rollout.server
    if config.engine == "embedded":
        return EmbeddedEngine(
            policy.model,
            config.precision,
            weights=policy.gather_weights(),
            indexers=policy.indexers is not None and run.rl.routing == "R3",
        )
    from foreroute.engines import sglang, vllm

    served = ServedModel.of(policy)
    if run.rl.routing != "R3":
        served = replace(served, indexers=None)  # whose choices nothing replays
    weights = None if server.weights_folder is None else Path(server.weights_folder)
    if config.engine == "sglang":  # TrainConfig refuses it without url and weights_folder
        assert server.url is not None
        assert weights is not None
        return sglang.SGLangServerEngine(served, server.url, weights_folder=weights, timeout_s=server.timeout_s)
    if server.url is not None:
        return vllm.VLLMEngine(served, server.url, weights_folder=weights, timeout_s=server.timeout_s)
    settings = vllm.ServerSettings(
        python=Path(str(server.python)),  # TrainConfig refuses vLLM without either
        precision=config.precision,
        max_model_len=server.max_model_len,
        sampling_masks=config.truncates,
        options=server.options,
    )
    return vllm.VLLMEngine(served, settings, timeout_s=server.timeout_s)


def make_optimizer(config: TrainConfig, policy: hf.RoutedTransformer) -> torch.optim.Optimizer:
    """Make AdamW over the parameters that RL changes; frozen routers get no gradients from here on."""
    if config.rl.router == "frozen":
        for parameter in policy.router_parameters():
            parameter.requires_grad_(False)
    # all of them, in the order of the model: a checkpoint names optimizer state by number
    parameters = list(policy.model.parameters())
    return torch.optim.AdamW(parameters, lr=config.rl.learning_rate, betas=BETAS, weight_decay=0.0)


def set_weights(model: nn.Module, weights: Mapping[str, Tensor], ranks: Alone) -> None:
    """Give a model the whole weights that rank 0 hands in, which fit it. A collective call."""
    set_model_state_dict(model, dict(weights), options=from_rank_0(ranks))


def from_rank_0(ranks: Alone) -> StateDictOptions:
    """Give torch's options to take up whole states: from rank 0 where there are several, one tensor at a time."""
    return StateDictOptions(full_state_dict=ranks.size > 1, broadcast_from_rank0=ranks.size > 1)


def require_fitting(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless a whole state is of a model: every weight, shape and dtype, and AdamW's state."""
    expected, seen = dict(model.state_dict()), dict(state["model"])
    parameters = dict(enumerate(model.parameters()))
    for number, values in state["optimizer"]["state"].items():
        seen |= {f"optimizer/{number}/{key}": each for key, each in values.items()}
        if (weight := parameters.get(number)) is not None:
            kept = {"step": torch.tensor(1.0), "exp_avg": weight, "exp_avg_sq": weight}
            expected |= {f"optimizer/{number}/{key}": each for key, each in kept.items()}
    for name in sorted(expected.keys() | seen.keys()):
        found, wanted = (
            f"{of[name].dtype} {list(of[name].shape)}" if name in of else "missing" for of in (seen, expected)
        )
        if found != wanted:
            raise ValueError(f"{name} is {found}; expected {wanted}")
        if name.endswith("/step") and not float(seen[name]) >= 1:
            raise ValueError(f"{name} is {float(seen[name])}; expected 1 or more")


@dataclass(frozen=True, eq=False)
class ScheduledPass:
    """Micro-steps that run on the same weights: recompute, or one mini-batch of the update."""

    name: str  # "recompute", or "update 0" and so on
    after: int  # how many optimizer steps of this rollout come before it
    micro_steps: list[NDArray[np.int64]]  # the sequences of each


class Alone:
    """Exchange of a run's processes where there is one: every question has its own answer.

    `ranks.Ranks` is the same for G = `size` processes, whose methods are then collective calls.
    """

    rank, size = 0, 1

    def on_all(self, what: str, work: Callable[[], T]) -> T:
        """Do this rank's part of the work, `what` in words. All ranks go on, or none."""
        return work()

    def on_rank_0(self, what: str, work: Callable[[], object]) -> None:
        """Have rank 0 do the work while the others wait. Raises as `on_all`."""
        self.on_all(what, lambda: work() if self.rank == 0 else None)

    def require_same(self, facts: Mapping[str, Any], advice: str) -> None:
        """Make sure that all ranks know the same facts, plain values by name; `advice` says what to do if not."""

    def max(self, numbers: ArrayLike) -> NDArray[np.int64]:
        """Give the elementwise largest of the integers of all ranks."""
        return np.asarray(numbers, np.int64)

    def sum(self, numbers: ArrayLike) -> NDArray[np.float64]:
        """Give the elementwise sum of the numbers of all ranks, added in their order: all get the same bits."""
        return np.asarray(numbers, np.float64)

    def all_gather(self, array: NDArray[Any]) -> NDArray[Any]:
        """Stack the arrays of all ranks, which have one shape and dtype, to [G, ...]."""
        return array[None]

    def gather(self, part: T) -> list[T]:
        """Collect the parts of all ranks on rank 0; elsewhere there are none."""
        return [part]


class OneProcess:
    """Execution of a policy's forwards and backwards in this process.

    `experts.ExpertParallel` does so on several ranks, where most methods are collective calls. `plan` announces passes;
    `running` is open during one of them, whose micro-steps replay what `to_replay` gives; `finish_gradients` comes
    before each optimizer step.
    """

    def __init__(self, policy: hf.RoutedTransformer, ranks: Alone) -> None:
        self.ranks, self._model = ranks, policy.model

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Give "model", the weights, and "optimizer", the "state" of its state dict, whole, on the host of rank 0."""
        whole = StateDictOptions(full_state_dict=self.ranks.size > 1, cpu_offload=self.ranks.size > 1)
        weights, kept = get_model_state_dict(self._model, options=whole), dict[str, Any]()
        if optimizer.state:  # torch would take a step to have some
            kept = dict[str, Any](get_optimizer_state_dict(self._model, optimizer, options=whole)).get("state", {})
        # a checkpoint names optimizer state by number
        numbers = {name: number for number, (name, _) in enumerate(self._model.named_parameters())}
        return {"model": weights, "optimizer": {"state": {numbers[name]: kept[name] for name in kept}}}

    def restore(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Take up what `state` gave on rank 0, on these ranks or others. Raises `ValueError` for another model."""
        self.ranks.on_rank_0("looking at the state", lambda: require_fitting(self._model, state))
        set_weights(self._model, state["model"], self.ranks)
        names, kept = [name for name, _ in self._model.named_parameters()], state["optimizer"]["state"]
        has_state = self.ranks.max([number in kept for number in range(len(names))])
        if has_state.any():
            # learning rates and such are the configuration's
            groups = [{**group, "params": names} for group in optimizer.param_groups]
            given: dict[str, Any] = {"state": {names[number]: kept[number] for number in kept}, "param_groups": groups}
            options = replace(from_rank_0(self.ranks), strict=False)
            set_optimizer_state_dict(self._model, optimizer, given if kept else {}, options=options)
        # or a resumed run would end with other bits than one that was never interrupted
        for parameter, is_kept in zip(self._model.parameters(), has_state, strict=True):
            if not is_kept:  # torch has made state for a weight that was never trained
                optimizer.state.pop(parameter, None)

    def plan(
        self,
        first: int,
        routes: RoutingTrace,
        passes: Sequence[ScheduledPass],
        optimizer: torch.optim.Optimizer,
        targets_S: NDArray[np.int64],
    ) -> list[ScheduledPass]:
        """Announce passes behind `first` optimizer steps, and their routes, for which experts may move homes.

        `targets_S` are response tokens of each sequence. Returns the passes as they are to run: each with its
        sequences, maybe in other micro-steps.
        """
        return list(passes)

    def running(self, planned: ScheduledPass) -> AbstractContextManager[None]:
        """Run the micro-steps of a pass that replays routes, by its plan if it was announced."""
        return nullcontext()

    def to_replay(self, number: int, routes: RoutingTrace) -> RoutingTrace | TraceRows:
        """Give what a micro-step of the pass is to replay: its routes, or the same as they were planned."""
        return routes

    def finish_gradients(self, max_norm: float) -> float:
        """Clip the gradients, before the optimizer steps. Returns their norm before it."""
        return torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm).item()

    def record(self) -> ExecutionRecord | None:
        """Give what is to be recorded about the step's execution on several ranks, on the first of them."""
        return None

    def close(self) -> None:
        """Give back the memory and threads that are held for it."""
