"""verl on a machine without a GPU: its platform for chips, filled in for a CPU. On GPUs nothing of this is loaded.

verl has a door for platforms of others, and none of its own for a CPU. Its engines are registered by device, and
`VERL_ENGINE_DEVICE` says which to take. A script imports this before verl. In a run under Ray every process does, by

    PYTHONPATH=examples/verl VERL_USE_EXTERNAL_MODULES=verl_on_cpu VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda
"""

import os
from contextlib import nullcontext
from types import SimpleNamespace

os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

nothing = lambda *_, **__: None  # noqa: E731
no_bytes = lambda *_, **__: 0  # noqa: E731
DEVICE = SimpleNamespace(
    **dict.fromkeys(("empty_cache", "synchronize", "set_device", "ipc_collect", "manual_seed_all"), nothing),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated"), no_bytes),
    memory_reserved=no_bytes,
    reset_peak_memory_stats=nothing,
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: "cpu",
    get_device_name=lambda *_: "CPU",  # by which verl's table of FLOPS knows it
    manual_seed=torch.manual_seed,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    mem_get_info=lambda *_: (1 << 30, 1 << 30),
)


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformBase):
    """A CPU, with gloo."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = nothing

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CPU_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return nullcontext()

    def ray_resource_name(self):
        return "GPU"  # Ray takes no "CPU" here; it is told of one GPU for each rank, by ray_init.num_gpus

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False  # weights go to the rollout in shared memory

    def cudart(self):
        return None


# verl asks for "cpu:gloo,<device>:<backend>", and torch refuses a device that is named twice
_init_process_group = dist.init_process_group


def init_process_group(backend=None, *args, **kwargs):
    if isinstance(backend, str):
        backend = ",".join(dict.fromkeys(backend.split(",")))
    return _init_process_group(backend, *args, **kwargs)


dist.init_process_group = init_process_group
