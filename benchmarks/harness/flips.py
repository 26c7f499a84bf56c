"""Flipped bits in every kind of file that foreroute writes or is given: refused, or read as what they must be."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foreroute.capture import Generation, load_generation
from foreroute.capture.generation import trace_of
from foreroute.costs.cluster_file import load_cluster
from foreroute.errors import ForerouteError
from foreroute.plan import load_counts, load_plan
from foreroute.records import read_runs
from foreroute.simulate.config import load_config as load_simulation
from foreroute.trace import RoutingTrace, load
from foreroute.train import RunFolder, TrainConfig, load_checkpoint, load_config, parse_config
from foreroute.train.checkpoint import read_checkpoint
from foreroute.train.run_folder import config_digest

DATA = "0123456789abcdef" * 2
"""Stands for the digest of a data set."""
HEADER_BYTES = 8192
"""Half of the flips are in the beginning of a file, where its header is."""


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        path: of a whole one.
        read: what its reader makes of it, as something that can be compared; reads whatever lies at `path`.
        same: files with a checksum are read with the same content, or not at all. What else may be read has passed the
            reader's own rules.
    """

    path: Path
    read: Callable[[], Any]
    same: bool = True


@dataclass
class Found:
    """What came of the flips of one kind."""

    flips: int = 0
    refused: int = 0
    accepted_wrong: int = 0
    tracebacks: int = 0
    unnamed: int = 0


def flipped(kinds: Mapping[str, Kind], flips: int, seed: int) -> dict[str, Found]:
    """Flip one bit at a time in each of the files, read it, and put the file right again."""
    return {name: _flipped(kind, flips, random.Random(f"{seed} {name}")) for name, kind in kinds.items()}


def _flipped(kind: Kind, flips: int, rng: random.Random) -> Found:
    found, written, expected = Found(), kind.path.read_bytes(), kind.read()
    # a hard link to it is another file from here on
    kind.path.unlink()
    try:
        for number in range(flips):
            position = rng.randrange(min(len(written), HEADER_BYTES) if number % 2 else len(written))
            damaged = bytearray(written)
            damaged[position] ^= 1 << rng.randrange(8)
            kind.path.write_bytes(damaged)
            found.flips += 1
            try:
                found.accepted_wrong += kind.same and kind.read() != expected
                if not kind.same:
                    kind.read()
            except ForerouteError as error:
                found.refused += 1
                found.unnamed += kind.same and kind.path.name not in str(error)
            except Exception:
                found.tracebacks += 1
    finally:
        kind.path.write_bytes(written)
    return found


def kinds_of(run: Path, config: TrainConfig, others: Mapping[str, Path]) -> dict[str, Kind]:
    """All kinds.

    Args:
        run: the folder of a run with data.
        config: of that run.
        others: files "trace", "plan", "counts", "train", "topology" and "simulate".
    """
    folder, last = RunFolder(run, config), RunFolder(run).last_checkpoint()
    assert last is not None, "the run has checkpoints"
    checkpoint = read_checkpoint(last)
    rollout = sorted((run / "rollouts").glob("step-??????.safetensors"))[-1]
    beside = trace_of(rollout)

    def metrics() -> Any:
        folder.metrics.take_up(checkpoint.state["step"], checkpoint.metrics)
        return folder.metrics.records()

    return {
        "checkpoint": Kind(last, lambda: plain(load_checkpoint(last))),
        "trace": Kind(others["trace"], lambda: of_trace(load(others["trace"]))),
        "generation": Kind(rollout, lambda: of_generation(load_generation(rollout))),
        "trace of a generation": Kind(beside, lambda: of_generation(load_generation(rollout))),
        "plan": Kind(others["plan"], lambda: plain_fields(load_plan(others["plan"]))),
        "metrics, resumed": Kind(run / "metrics.jsonl", metrics),
        "metrics, reported": Kind(run / "metrics.jsonl", lambda: _in_order(run), same=False),
        "configuration, resumed": Kind(run / "config.json", lambda: _fixed(folder, run)),
        "configuration, reported": Kind(run / "config.json", lambda: read_runs([run]), same=False),
        "data": Kind(run / "data.txt", lambda: _data(folder, run)),
        "TOML of training": Kind(others["train"], lambda: load_config(others["train"]), same=False),
        "TOML of a topology": Kind(others["topology"], lambda: load_cluster(others["topology"]), same=False),
        "TOML of a simulation": Kind(others["simulate"], lambda: load_simulation(others["simulate"]), same=False),
        "counts": Kind(others["counts"], lambda: load_counts(others["counts"]).tolist()),
    }


def _in_order(run: Path) -> None:
    """What the report shows; the rule of this file is that its steps are those from 0 on."""
    steps = [step.step for step in read_runs([run])[0].steps]
    assert steps == list(range(len(steps))), "steps in order"


def _fixed(folder: RunFolder, run: Path) -> str:
    """Of the configuration that a run goes on with, what may not change."""
    folder.require_begun()
    stored = json.loads((run / "config.json").read_text(encoding="utf-8"))
    return config_digest(parse_config(stored, source="config.json"))


def _data(folder: RunFolder, run: Path) -> str:
    folder.bind_data(DATA, begun=True)
    return (run / "data.txt").read_text(encoding="utf-8")


def plain(value: Any) -> Any:
    """Something that == compares to the bit, types and shapes included."""
    if isinstance(value, torch.Tensor):
        bits = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return (str(value.dtype), tuple(value.shape), bits)
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, Mapping):
        return [(key, plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    return repr(value)


def plain_fields(value: Any) -> Any:
    """Likewise, of a dataclass."""
    return [(field.name, plain(getattr(value, field.name))) for field in fields(value)]


def of_trace(trace: RoutingTrace) -> Any:
    """Likewise; the order of its provenance says nothing."""
    return [each for each in plain_fields(trace) if each[0] != "provenance"] + [sorted(trace.provenance.items())]


def of_generation(generation: Generation) -> Any:
    """Likewise."""
    return [of_trace(generation.trace), *(each for each in plain_fields(generation) if each[0] != "trace")]


def copied(folder: Path, target: Path) -> Path:
    """A copy, to do things to."""
    shutil.copytree(folder, target)
    return target


def summary(found: Mapping[str, Found]) -> dict[str, dict[str, int]]:
    """Of each kind."""
    return json.loads(json.dumps({name: asdict(each) for name, each in found.items()}))  # type: ignore[no-any-return]
