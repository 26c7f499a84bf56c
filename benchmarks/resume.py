"""Kill and resume: a run that is killed at random moments (SIGKILL), and resumed each time, against one that is not.

A moment is a random number of steps, and then a random part of the time that a step takes.

    metrics.kills             how often a process was killed
    metrics.runs              that many runs took these kills, one after the other
    metrics.same              share of the runs that ended with the same bits: weights, optimizer, and all metrics but
                              times
    metrics.steps_at_kill     steps that were recorded at each kill
"""

from __future__ import annotations

import json
import multiprocessing
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from foreroute.train import RunFolder, load_checkpoint, parse_config, train

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
VALUES: dict[str, Any] = {
    "name": "killed",
    "device": "cpu",
    "model": {"sizes": SIZES},
    "task": {"min_operands": 2, "max_operands": 3},
    "warm_start": {"max_steps": 40, "batch_size": 32},
    "rollout": {"prompts": 8, "group_size": 4},
    "rl": {"steps": 24, "mini_steps": 2, "warmup_steps": 2},
    "checkpoint": {"every": 2},
    "measure": {"save_trace_every": 2},
}
Process = Any

MUST_BE = {"same": 1.0}
"""Metrics of a run in which all is well."""


def run(*, quick: bool) -> dict[str, Any]:
    """Two kills when quick, ten otherwise."""
    wanted, rng = 2 if quick else 10, random.Random()
    kills: list[int] = []
    same: list[bool] = []
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        _started(whole, resume=False).join()
        step_s = sum(sum(line["seconds"].values()) for line in _lines(whole)) / VALUES["rl"]["steps"]
        while len(kills) < wanted:
            killed = Path(name) / f"killed-{len(same)}"
            kills += _killed_run(killed, wanted - len(kills), step_s, rng)
            same.append(_outcome(killed) == _outcome(whole) and _same_checkpoint(killed, whole))
    metrics = {"kills": len(kills), "runs": len(same), "same": sum(same) / len(same), "steps_at_kill": kills}
    return {"metrics": metrics, "baselines": {"step_s": round(step_s, 3)}}


def _killed_run(folder: Path, at_most: int, step_s: float, rng: random.Random) -> list[int]:
    """One run to its end. Returns how many steps were recorded at each kill."""
    kills: list[int] = []
    while True:
        process = _started(folder, resume=(folder / "config.json").exists())
        if len(kills) < at_most:
            reach = _recorded(folder) + rng.randint(0, 4)
            while process.is_alive() and _recorded(folder) < reach:
                time.sleep(0.01)
            process.join(rng.uniform(0, step_s))
        else:
            process.join()
        if process.exitcode == 0:
            return kills
        if process.exitcode is not None:
            raise RuntimeError(f"a resumed process failed with exit code {process.exitcode}; its error is above")
        process.kill()
        process.join()
        kills.append(_recorded(folder))


def _recorded(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _started(folder: Path, *, resume: bool) -> Process:
    """A process that takes the run up; forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.resume", "foreroute.adapters.hf"])
    process = context.Process(target=_train, args=(str(folder), resume))
    process.start()
    return process


def _train(folder: str, resume: bool) -> None:
    train(parse_config(VALUES, source="benchmarks/resume.py"), Path(folder), resume=resume)


def _outcome(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in _lines(folder)]


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _same_checkpoint(a: Path, b: Path) -> bool:
    last = [RunFolder(folder).last_checkpoint() for folder in (a, b)]
    states = [load_checkpoint(path) for path in last if path is not None]
    return len(states) == 2 and same_state(*states)


def same_state(a: Any, b: Any) -> bool:
    """Whether states of trainers, such as checkpoints hold, are the same to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    return bool(a == b)
