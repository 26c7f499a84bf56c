"""Where a run computes: found once, before anything is made, and told in every record."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from foreroute.errors import ConfigError

CPU = torch.device("cpu")


def find_device(asked: str) -> torch.device:
    """Find the device of this process.

    Args:
        asked: "cpu"; "cuda", that of this process among those of the machine (`LOCAL_RANK` under torchrun, else the
            first); "cuda:N"; or "auto", which is "cuda" where every process of the machine has a CUDA device of its
            own, and else "cpu". So all processes of a machine decide alike.

    Raises:
        ConfigError: when the device is not there, or the environment says nonsense.
    """
    if asked == "cpu":
        return CPU
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rank, processes = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)
    if asked == "auto":
        return torch.device("cuda", rank) if max(rank + 1, processes) <= there else CPU
    wanted = torch.device(asked).index if ":" in asked else rank
    if wanted is None or wanted >= there:
        whose = f", that of process {rank} of the machine," if ":" not in asked and processes > 1 else ""
        raise ConfigError(
            f'device = "{asked}" needs CUDA device {wanted}{whose} and torch {torch.__version__} sees {there}; '
            'set device = "auto" or "cpu", start no more processes than there are devices, or install a torch for CUDA'
        )
    return torch.device("cuda", wanted)


def device_of(model: nn.Module) -> torch.device:
    """Find the device that the parameters of a model are on."""
    return next(model.parameters()).device


def use_device(device: torch.device, threads: int) -> None:
    """Have the thread that calls this launch on the device by default, and torch use so many threads on the CPU."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def backend_of(device: torch.device) -> str:
    """Name the backend for torch.distributed. Plans, votes and records are exchanged on the host in any case."""
    return "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"


def require_backend(device: torch.device) -> None:
    """Make sure that the processes, who found each other already, can exchange tensors of the device.

    Raises:
        ConfigError: when they cannot.
    """
    given = dist.get_backend_config()
    # gloo takes tensors of a GPU in some collectives, and in the exchange of rows not
    if ("cuda:nccl" if device.type == "cuda" else "cpu:") not in given:
        raise ConfigError(
            f"torch.distributed was started with {given}, which carries no tensors of {device}; start it with "
            f'backend "{backend_of(device)}", or set device = "cpu"'
        )


def reset_memory_peak(device: torch.device) -> None:
    """Count anew what `memory_peak` gives."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_peak(device: torch.device) -> int:
    """Give the most bytes that tensors took at a time on the device; 0 on the CPU, where torch counts none."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def device_record(device: torch.device, most_bytes: int) -> dict[str, Any]:
    """Make the record "device" of a step.

    Args:
        device: of the policy on rank 0.
        most_bytes: `memory_peak` of the rank that had the highest.
    """
    if device.type != "cuda":
        return {"device": {"kind": device.type, "name": platform.machine()}}
    record = {"kind": device.type, "name": torch.cuda.get_device_name(device), "peak_memory_bytes": most_bytes}
    return {"device": record}


def synchronize(device: torch.device) -> None:
    """Wait for what was launched on it, so that a clock that is read next has seen it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _number(variable: str, default: int) -> int:
    said = os.environ.get(variable, str(default))
    if not (said.isascii() and said.isdecimal()):
        raise ConfigError(f"the environment has {variable}={said!r:.40}, no number; unset it, or use torchrun")
    return int(said)
