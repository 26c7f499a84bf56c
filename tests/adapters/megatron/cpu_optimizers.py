"""Megatron's DistributedDataParallel and optimizers on the CPU: they ask tensors for the names of CUDA types.

What they do with parameters, gradients and state is theirs.
"""

import torch
from megatron.core import utils
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.optimizer import OptimizerConfig, clip_grads, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer import optimizer as optimizers

from foreroute.testing.megatron_on_cpu import name_types_of_cuda, read_cuda_as_cpu

MEGATRON = {
    "float32": {},
    "master weights": {"bf16": True},
    "distributed": {"use_distributed_optimizer": True},
    "distributed master weights": {"bf16": True, "use_distributed_optimizer": True},
}
"""The optimizers of Megatron that run on the CPU, and what an OptimizerConfig says for them."""
TORCH = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


class Trained:
    """A model in DDP, `chunks`, with its `optimizer` of torch or of Megatron."""

    def __init__(self, chunks, name, **told):
        install()
        self._is_megatron = name in MEGATRON
        settings = MEGATRON.get(name, {})
        if "bf16" in settings:
            chunks = [chunk.bfloat16() for chunk in chunks]
        is_distributed = "use_distributed_optimizer" in settings
        config = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed, **told)
        self.chunks = [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]
        if self._is_megatron:
            wanted = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, **settings}
            if "overlap_param_gather" in told:
                wanted["overlap_param_gather"] = True
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(**wanted), self.chunks, use_gloo_process_groups=False
            )
        else:
            self.optimizer = TORCH[name]([p for chunk in self.chunks for p in chunk.parameters()])

    def zero_grad(self):
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self):
        """Sum gradients over ranks, as Megatron's loop does, and step."""
        finalize_model_grads(self.chunks)
        self.apply()

    def apply(self):
        if not self._is_megatron:
            for chunk in self.chunks:
                for parameter in chunk.parameters():
                    parameter.grad = parameter.main_grad
        self.optimizer.step()

    def kept(self, parameter):
        """What is kept for a parameter here: (name, first element, elements of the whole, tensor)."""
        if not self._is_megatron:
            return _all_of(self.optimizer.state[parameter])
        found = []
        for part in self.optimizer.chained_optimizers:
            if isinstance(part, distrib_optimizer.DistributedOptimizer):
                if parameter in part.model_param_gbuf_map:
                    first = part._get_model_param_range_map(parameter)["param"].start
                    tensors = part._get_main_param_and_optimizer_states(parameter)
                    wholes = {name: parameter.numel() if t.dim() else 1 for name, t in tensors.items()}
                    found += [(name, first if t.dim() else 0, wholes[name], t) for name, t in tensors.items()]
                continue
            main = getattr(parameter, "main_param", parameter)
            if main in part.optimizer.state:
                found += _all_of({"main": main, **part.optimizer.state[main]})
        return found


def _all_of(tensors):
    return [(name, 0, t.numel(), t) for name, t in tensors.items() if torch.is_tensor(t)]


def install():
    """Let them run in this process, in float64 too: they know three types by name, and Megatron's loss is float32."""
    read_cuda_as_cpu(optimizers, distrib_optimizer, clip_grads, param_and_grad_buffer, utils)
    name_types_of_cuda()
    if hasattr(torch.Tensor.float, "stays"):
        return
    named, rounded = torch.Tensor.type, torch.Tensor.float

    def type_of(tensor, *args, **kwargs):
        found = named(tensor, *args, **kwargs)
        return "torch.cuda.FloatTensor" if found == "torch.cuda.DoubleTensor" else found

    def to_float(tensor, *args, **kwargs):
        return tensor if tensor.dtype == torch.float64 else rounded(tensor, *args, **kwargs)

    to_float.stays = True
    torch.Tensor.type, torch.Tensor.float = type_of, to_float
