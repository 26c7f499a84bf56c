"""What a training run reads and leaves: its configuration, data set, metrics and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fuzzing.mutations import damage, forge, forge_text
from benchmarks.fuzzing.target import Target, written
from benchmarks.fuzzing.texts import json_lines, require_unchanged, toml_target
from foreroute.mismatch import LOG10_EDGES
from foreroute.records import Run, read_run
from foreroute.train import TrainConfig, load_config, parse_config
from foreroute.train.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from foreroute.train.run_folder import RunFolder
from foreroute.train.tasks.jsonl import Row, parse_rows

TRAINING = {
    "name": "fuzz",
    "seed": 3,
    "model": {"sizes": {"hidden_size": 32, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}},
    "task": {"min_operands": 2, "max_operands": 4},
    "warm_start": {"max_steps": 8, "batch_size": 16, "stop_at_loss": 0.01},
    "rollout": {"prompts": 6, "group_size": 4, "temperature": 1.0, "precision": "bfloat16"},
    "rl": {"steps": 5, "micro_step_tokens": 64, "warmup_steps": 2, "routing": "R3", "learning_rate": 1e-3},
    "checkpoint": {"every": 2},
    "measure": {"save_trace_every": 2},
    "alarms": {"action": "warn"},
}
ROWS: list[dict[str, Any]] = [
    {"prompt": "What is 3 * 4?", "answer": "12"},
    {"messages": [{"role": "system", "content": "Count."}, {"role": "user", "content": "2 + 2"}], "answer": 4},
    {"prompt": "Name a colour.", "hint": ["red", 1, None]},
]

STORED = json.dumps(parse_config(TRAINING, source="fuzz").model_dump())


def run_targets(folder: Path) -> list[Target]:
    """Their readers."""
    return [
        toml_target("training", TRAINING, load_config, _require_config, folder),
        Target(
            name="data set",
            make=lambda rng: json_lines(ROWS),
            read=lambda raw: parse_rows(raw, "rows.jsonl"),
            same=lambda a, b: [row.values for row in a] == [row.values for row in b],
            forge=forge_line,
            check=_require_rows,
        ),
        Target(
            name="metrics",
            make=lambda rng: json_lines([_step(number, rng) for number in range(3)]),
            read=lambda raw: read_run(_run_folder(raw, folder / "run")),
            same=lambda a, b: a.steps == b.steps,
            forge=forge_line,
            check=_require_steps,
        ),
        Target(
            name="stored configuration",
            make=lambda rng: STORED.encode(),
            read=lambda raw: _reopened(raw, folder / "stored"),
            same=lambda a, b: a == b,
            forge=lambda raw, rng: forge_text(raw.decode(), rng).encode("utf-8", "surrogatepass"),
            check=_require_stored,
        ),
        Target(
            name="checkpoint",
            make=lambda rng: _checkpoint_bytes(rng, folder / "made"),
            read=lambda raw: read_checkpoint(written(raw, folder / "checkpoint")),
            same=_same_state,
            forge=lambda raw, rng: forge(raw, rng),
            check=_require_state,
            has_checksum=True,
            weight=2.0,
        ),
    ]


def forge_line(raw: bytes, rng: np.random.Generator) -> bytes:
    """One line forged, dropped, doubled or moved."""
    lines = raw.split(b"\n")[:-1]
    place = int(rng.integers(len(lines)))
    chosen = rng.random()
    if chosen < 0.1:
        del lines[place]
    elif chosen < 0.2:
        lines.append(lines[place])
    else:
        try:
            lines[place] = forge_text(lines[place].decode(), rng).encode()
        except UnicodeError:  # a lone surrogate
            lines[place] = damage(lines[place], rng)
    return b"\n".join(lines) + b"\n"


def _require_config(given: dict[str, Any], config: TrainConfig) -> None:
    require_unchanged(given, config)
    assert config.rl.steps >= 1
    assert config.name not in ("", ".", "..")
    assert "/" not in config.name


def _require_rows(raw: bytes, rows: list[Row]) -> None:
    lines = [line for line in raw.split(b"\n") if line]
    assert len(rows) == len(lines)
    for row, line in zip(rows, lines, strict=True):
        given = json.loads(line)
        assert ("prompt" in given) != ("messages" in given)
        assert row.values == {**given, **({"answer": str(given["answer"])} if "answer" in given else {})}
        texts = [given["prompt"]] if "prompt" in given else [m["content"] for m in given["messages"]]
        assert all(isinstance(text, str) for text in texts)


def _require_steps(raw: bytes, run: Run) -> None:
    numbers = [step.step for step in run.steps]
    assert numbers == sorted(set(numbers))
    assert all(type(number) is int and number >= 0 for number in numbers)
    given = {}
    for line in raw.split(b"\n"):
        try:
            values = json.loads(line)
            given[values["step"]] = values
        except (ValueError, KeyError, TypeError):  # a torn last line, which is left out and said so
            continue
    for step in run.steps:
        # a key that is not there was not recorded
        reward = given[step.step].get("reward_mean")
        assert step.reward_mean == (None if reward is None else float(str(reward)))
        assert type(given[step.step]["step"]) is int


def _run_folder(raw: bytes, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"name": "fuzz", "seed": 3, "rollout": {"precision": "bfloat16"}, "rl": {"routing": "R3"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_bytes(raw)
    return folder


def _step(number: int, rng: np.random.Generator) -> dict[str, Any]:
    layers, response_tokens = 2, 40
    mismatch = {
        "response_tokens": response_tokens,
        "k3": float(rng.random()),
        "f2": 0.01,
        "max_abs_log_ratio": 3.0,
        "routed_rows": 50,
        "differing_share": 0.1,
        "differing_tokens_share": 0.2,
        "differing_share_by_layer": [0.1] * layers,
    }
    return {
        "step": number,
        "weight_version": number,
        "seconds": {"rollout": 0.4, "recompute": 0.1, "update": 0.3, "measure": 0.1},
        "reward_mean": float(rng.random()),
        "reward_std": 0.2,
        "exact_share": 0.3,
        "response_tokens_mean": 9.0,
        "entropy": 1.5,
        "grad_norm": 0.8,
        "clip_share": 0.01,
        "loss": 0.0,
        "tokens": 4096,
        "mismatch": {"native": mismatch, "replayed": mismatch},
        "margins_LB": [[3] * (len(LOG10_EDGES) - 1)] * layers,
        "expert_load": {"4": 1.3},
    }


def _reopened(raw: bytes, folder: Path) -> str:
    """A run is taken up when its stored configuration is the one that is given, but for what may change."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(raw)
    RunFolder(folder, parse_config(TRAINING, source="fuzz")).require_begun()
    return raw.decode()


def _require_stored(raw: bytes, text: str) -> None:
    given, expected = json.loads(text), json.loads(STORED)
    for values in (given, expected):
        for name in ("device", "parallel", "alarms", "logging"):
            values.pop(name, None)
        values["rl"].pop("steps", None)
    assert given == expected


def _checkpoint_bytes(rng: np.random.Generator, path: Path) -> bytes:
    seed = torch.Generator().manual_seed(int(rng.integers(2**31)))
    weights = {f"layer.{n}.weight": torch.randn(3, 4, generator=seed) for n in range(3)}
    weights["gate"] = torch.randn(5, generator=seed).to(torch.bfloat16)
    state = {
        "step": int(rng.integers(0, 50)),
        "model": weights,
        "optimizer": {"state": {0: {"step": torch.tensor(4.0), "exp_avg": torch.randn(3, 4, generator=seed)}}},
        "rollouts": (None, [1, 2.5, "text", True], {}),
    }
    write_checkpoint(path, Checkpoint(state, "ab" * 16, "cd" * 16))
    return path.read_bytes()


def _same_state(a: Checkpoint, b: Checkpoint) -> bool:
    return a.config == b.config and a.metrics == b.metrics and _equal(a.state, b.state)


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _bits(tensor: torch.Tensor) -> bytes:
    """Not the values: a NaN is equal to itself here."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _require_state(raw: bytes, checkpoint: Checkpoint) -> None:
    assert type(checkpoint.state["step"]) is int
    assert checkpoint.state["step"] >= 0
    assert isinstance(checkpoint.state["model"], dict)
