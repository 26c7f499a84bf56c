"""Run as a process, since a device that stands in for a GPU is registered for the whole of one: writes JSON."""

import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu import cost
from benchmarks.gpu.part import Part
from benchmarks.gpu.stand_in import Counting, StandInTensor, stand_in_device


def toys():
    """What is counted of works whose launches and waits are known."""
    x, host = StandInTensor(torch.arange(6.0).view(2, 3)), torch.ones(2, 3)
    place = stand_in_device()
    ids = StandInTensor(torch.tensor([1, 0]))
    works = {
        "sum": lambda: (x * 2).sum(),
        "views": lambda: x.view(3, 2)[1:].t().detach(),
        "item": lambda: x.sum().item(),
        "to the host": lambda: x.cpu(),
        "to the device": lambda: host.to(place),
        "to the device, without waiting": lambda: host.to(place, non_blocking=True),
        "into the device": lambda: x.copy_(host),
        "in place": lambda: x[0].add_(1),
        "by a mask": lambda: x[x > 2],
        "by indices": lambda: x[ids],
        "by indices of the host": lambda: x[torch.tensor([1, 0])],
        "on the host": lambda: (host * 2).sum().item(),
        "made": lambda: torch.zeros(3, device=place),
    }
    found = {}
    with Counting() as counting:
        for name, work in works.items():
            found[name] = counting.count(work)
            x.sum().item()  # which is no part of it
    return {name: (counts.launches, counts.waits) for name, counts in found.items()}


def main():
    torch.set_num_threads(1)
    part = Part("cost", torch.device("cpu"), False, time.monotonic() + 600, Path(sys.argv[1]))
    cost.run(part)
    found = {"toys": toys(), "figures": part.figures}
    part.file.with_name("counted.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
