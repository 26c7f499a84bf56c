"""Megatron-Core on the CPU: what its code takes for granted of CUDA, stood in for in one place.

For tests and examples alone. A machine with GPUs needs none of this, and the library does not import it.

    megatron_on_cpu.install()                            # before anything of megatron.core
    TransformerConfig(**megatron_on_cpu.CONFIG, ...)

Nothing that routes, dispatches, schedules or differentiates is replaced: streams, events and CUDA's random state are
stand-ins that do nothing, `device="cuda"` reads "cpu", `torch.compile` compiles nothing in this process, and two lines
that gloo cannot take are put right. Norms of Transformer Engine, types of CUDA and the server of checkpoints have their
stand-ins here too, for those who ask for them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import queue
import sys
import types
from typing import Any

import torch

CONFIG: dict[str, Any] = {
    "use_cpu_initialization": True,
    "normalization": "LayerNorm",  # Megatron's own RMSNorm without Transformer Engine is for inference
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "attention_dropout": 0.0,  # CUDA's random state has no stand-in that draws
    "hidden_dropout": 0.0,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "moe_permute_fusion": False,
}
"""Settings that keep a TransformerConfig off kernels of CUDA alone."""


def install() -> None:
    """Let megatron.core be imported and run in this process without CUDA. Twice is as good as once."""
    _stub_triton()
    # functions that Megatron fuses are a handful of operators, and compiling them takes longer than calling them
    torch.compiler.set_stance("force_eager")
    for name, stand_in in {
        "current_device": lambda: "cpu",
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *args: _Stream(),
        "stream": lambda *args: contextlib.nullcontext(),
        "synchronize": lambda *args: None,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    }.items():
        setattr(torch.cuda, name, stand_in)
    setattr(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor)  # noqa: B010
    _stand_in_for_random_state()
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import optimizer
    from megatron.core.pipeline_parallel import schedules

    read_cuda_as_cpu(schedules, rope_utils, optimizer)
    _mend_for_gloo()


class _Stream:
    """A stream or event of a device that has none: everything is done when it is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def record_event(self, *args: Any) -> _Stream:
        return self

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


class _RandomStates:
    """CudaRNGStatesTracker without states: dropout is off, and weights are drawn on the CPU."""

    def is_initialized(self) -> bool:
        return True

    def inference_rng_tracker(self) -> bool:
        return False

    def fork(self, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def add(self, *args: Any) -> None: ...

    def reset(self) -> None: ...

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: dict[str, Any]) -> None: ...


class _Torch:
    """The torch module as one Megatron module sees it: `device="cuda"` is "cpu" and nothing is pinned."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **_on_cpu(kwargs))

    def tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **_on_cpu(kwargs))


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    stand_ins = {"device": "cpu", "pin_memory": False}
    return {name: stand_ins.get(name, value) for name, value in kwargs.items()}


def read_cuda_as_cpu(*modules: Any) -> None:
    """Let modules of Megatron that name the device in so many words make their tensors on the CPU."""
    for module in modules:
        module.torch = _Torch()


class _Norm(torch.nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            # ranks of tensor parallelism each see a share of its rows
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(_Norm, torch.nn.RMSNorm):
    """Stands where TENorm does: without Transformer Engine, Megatron's newest has no RMSNorm to train with."""


class LayerNorm(_Norm, torch.nn.LayerNorm):
    """As `RMSNorm`, for a configuration that says LayerNorm."""


def use_norm(block: Any, norm: type[torch.nn.Module], *, of_heads: bool) -> None:
    """Have the layer specs of a decoder built with a norm.

    Args:
        block: the specs, as `get_gpt_decoder_block_spec` gives them.
        norm: `RMSNorm` or `LayerNorm`.
        of_heads: whether queries and keys are normed too.
    """
    block.layer_norm = norm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        attention = layer.submodules.self_attention.submodules
        if of_heads:
            attention.q_layernorm = attention.k_layernorm = norm


def name_types_of_cuda() -> None:
    """Let tensors say types of CUDA: Megatron's optimizers know parameters by the names of their types."""
    inner = torch.Tensor.type
    if inner.__name__ == "type_of":
        return

    def type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        said: Any = inner(tensor, *args, **kwargs)
        return said if args or kwargs or "cuda" in said else said.replace("torch.", "torch.cuda.", 1)

    setattr(torch.Tensor, "type", type_of)  # noqa: B010


def write_checkpoints_without_server() -> None:
    """Let Megatron's writers of checkpoints report to a plain queue, as is enough for a save that is waited for.

    Their server is a process, made by importing the program again: on two cores, in ten seconds. It also outlives a
    rank that is killed.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


def _stand_in_for_random_state() -> None:
    from megatron.core.tensor_parallel import random

    random._CUDA_RNG_STATE_TRACKER = _RandomStates()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None


def _mend_for_gloo() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # 0.16 without Transformer Engine names it before it looks whether it is there
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    def as_splits(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # Megatron turns splits into numbers on their way off the GPU; on the CPU they stay tensors, which gloo refuses
    token_dispatcher.maybe_move_tensor_to_cpu = as_splits


def _stub_triton() -> None:
    """megatron-core from 0.18 imports triton without using it on this path, and its wheel is a gigabyte."""
    if importlib.util.find_spec("triton") is not None:
        return
    # these look for triton once and remember: they must not find the stub
    for name in ("torch._inductor.compile_fx", "torch._inductor.runtime.triton_compat"):
        importlib.import_module(name)
    importlib.import_module("torch.utils._triton").has_triton_package()

    def decorator(function: Any = None, **kwargs: Any) -> Any:
        return function if function else lambda decorated: decorated

    def decorators(*args: Any, **kwargs: Any) -> Any:
        return decorator

    language = _Stub("triton.language", constexpr=int, dtype=object)
    names = {"language": language, "jit": decorator, "autotune": decorators, "heuristics": decorators}
    triton = _Stub("triton", __version__="3.9.0", __path__=[], **names)
    for module in (triton, language):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module


class _Stub(types.ModuleType):
    """A module that has every name, for code that is imported and never run."""

    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name)
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Anything:
    """Stands for a name of triton: can be called, decorated with, and written in annotations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_decorator = len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], _Anything)
        return args[0] if is_decorator else _Anything()

    def __or__(self, other: Any) -> _Anything:
        return self

    __ror__ = __or__
