"""Trainers that name CUDA, on a machine without it: what they ask of torch.cuda is answered for the CPU, over gloo."""

import importlib.machinery
import os
import shutil
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

EXAMPLES = Path(__file__).parents[2] / "examples"


def patched(package, patch, folder):
    """Put a package as it was released, and the patch applied, before the released one, and stand in for CUDA."""
    released = Path(find_spec(package).origin).parent
    shutil.copytree(released, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["patch", "-p1", "--fuzz=0", "-i", EXAMPLES / patch], cwd=folder, check=True)
    sys.path.insert(0, str(folder))
    stand_in(folder)


def stand_in(folder):
    """A process with gloo, in which CUDA's current device is the CPU."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_rng_state = torch.get_rng_state
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.cuda.max_memory_allocated = lambda *_: 0
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed_all", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    make = device_mesh.init_device_mesh

    def on_cpu(device_type, *args, **kwargs):
        return make("cpu", *args, **kwargs)

    device_mesh.init_device_mesh = torch.distributed.init_device_mesh = on_cpu
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)


class _Devices(type):
    def __instancecheck__(cls, instance):
        return isinstance(instance, torch.device)


class _Device(metaclass=_Devices):
    def __new__(cls, *_):
        return torch.device("cpu")


class Torch:
    """torch for modules that name a device of CUDA's: every device is the CPU."""

    device = _Device

    def empty(self, *args, device=None, **kwargs):
        return torch.empty(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(torch, name)


def names_no_device(package):
    """Give that torch to all modules of a package that are imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package) and vars(module).get("torch") is torch:
            module.torch = Torch()


def flash_attn():
    """The modules of flash-attn, without what packs or attends."""
    import transformers  # noqa: F401  it asks whether flash-attn is installed, once

    names = ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed")
    package, bert_padding, _, distributed = modules = [types.ModuleType(name) for name in names]
    package.__spec__, package.__path__ = importlib.machinery.ModuleSpec("flash_attn", None), []
    bert_padding.unpad_input = bert_padding.pad_input = None
    bert_padding.index_first_axis = bert_padding.rearrange = None
    distributed.all_gather = None
    sys.modules |= dict(zip(names, modules, strict=True))
