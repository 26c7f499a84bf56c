"""The device's name, and the versions that figures depend on."""

from __future__ import annotations

import os
import platform
import subprocess

import torch

from benchmarks.gpu.figures import Figures


def run(figures: Figures) -> None:
    """Look them up."""
    if figures.device.type == "cpu":
        figures.record(device_name=f"a CPU with {os.cpu_count()} cores")
        return
    figures.record(
        device_name=torch.cuda.get_device_name(figures.device),
        memory_gib=round(torch.cuda.get_device_properties(figures.device).total_memory / 2**30),
        cuda=str(torch.version.cuda),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        driver=_driver(),
        kernel=platform.release(),
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
