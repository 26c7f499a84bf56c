"""Kill and resume: a run that is killed at random moments (SIGKILL), and resumed each time, against one that is not.

    metrics.kills             how often a process was killed
    metrics.runs              that many runs took these kills, one after the other
    metrics.same              share of the runs that ended with the same bits: weights, optimizer, and all metrics but
                              times
    metrics.killed_in_step    the step that each kill came in, -1 before the first
    metrics.kill_moments_s    how long each killed process had run

Speed is not what is measured: a busy machine changes when the kills come, and nothing else.
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
    "model": {"sizes": SIZES},
    "task": {"min_operands": 2, "max_operands": 3},
    "warm_start": {"max_steps": 40, "batch_size": 32},
    "rollout": {"prompts": 8, "group_size": 4},
    "rl": {"steps": 24, "mini_steps": 2, "warmup_steps": 2},
    "checkpoint": {"every": 2},
    "measure": {"save_trace_every": 2},
}
Process = Any


def run(*, quick: bool) -> dict[str, Any]:
    """Two kills when quick, ten otherwise."""
    wanted, rng = 2 if quick else 10, random.Random()
    kills: list[tuple[float, int]] = []
    same: list[bool] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begun = time.monotonic()
        _started(folder / "whole", resume=False).join()
        whole_s = time.monotonic() - begun
        while len(kills) < wanted:
            killed = folder / f"killed-{len(same)}"
            kills += _killed_run(killed, wanted - len(kills), whole_s, rng)
            same.append(_outcome(killed) == _outcome(folder / "whole") and _same_state(killed, folder / "whole"))
    metrics = {
        "kills": len(kills),
        "runs": len(same),
        "same": sum(same) / len(same),
        "killed_in_step": [step for _, step in kills],
        "kill_moments_s": [round(moment, 3) for moment, _ in kills],
    }
    return {"metrics": metrics, "baselines": {"whole_run_s": round(whole_s, 2)}}


def _killed_run(folder: Path, at_most: int, whole_s: float, rng: random.Random) -> list[tuple[float, int]]:
    """One run to its end. Returns the moment and the step of each kill."""
    kills: list[tuple[float, int]] = []
    while True:
        process = _started(folder, resume=(folder / "config.json").exists())
        moment = rng.uniform(0, whole_s / 2)
        process.join(moment if len(kills) < at_most else None)
        if process.exitcode == 0:
            return kills
        if process.exitcode is not None:
            raise RuntimeError(f"a resumed process failed with exit code {process.exitcode}; its error is above")
        process.kill()
        process.join()
        path = folder / "metrics.jsonl"
        kills.append((moment, path.read_text(encoding="utf-8").count("\n") - 1 if path.exists() else -1))


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
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def _same_state(a: Path, b: Path) -> bool:
    last = [RunFolder(folder).last_checkpoint() for folder in (a, b)]
    states = [load_checkpoint(path) for path in last if path is not None]
    return len(states) == 2 and _same(*states)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
