"""What a device is called, and the versions that its figures depend on."""

from __future__ import annotations

import json
import os
import platform
import subprocess

import torch


def describe(name: str) -> None:
    """Print it as one line of JSON.

    Raises:
        SystemExit: when torch does not see the device.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SystemExit(f"--device {name!r} is no device of torch: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise SystemExit(f"--device {name} is not supported; expected cuda, cuda:N or cpu")
    if device.type == "cpu":
        print(json.dumps({"device_name": f"a CPU with {os.cpu_count()} cores", "env": {}}))
        return
    if (device.index or 0) >= torch.cuda.device_count():
        raise SystemExit(
            f"--device {name}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here; "
            "--device cpu shows that the command works"
        )
    memory = torch.cuda.get_device_properties(device).total_memory
    env = {
        "GPU memory": f"{memory / 2**30:.0f} GiB",
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": _driver(),
        "kernel": platform.release(),
    }
    print(json.dumps({"device_name": torch.cuda.get_device_name(device), "env": env}))


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
