"""What a training run reads and leaves: its configuration, data set, metrics, rollbacks and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzzing.mutations import damage, forge_text
from benchmarks.fuzzing.target import Target, written
from benchmarks.fuzzing.texts import json_lines, require_unchanged, toml_target
from foreroute.report.reading import read_run
from foreroute.report.records import Run
from foreroute.train import TrainConfig, load_config
from foreroute.train.tasks.rows import Row, read_rows

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


def run_targets(folder: Path) -> list[Target]:
    """Their readers."""
    return [
        toml_target("training", TRAINING, load_config, _require_config, folder),
        Target(
            name="data set",
            make=lambda rng: json_lines(ROWS),
            read=lambda raw: read_rows(written(raw, folder / "rows.jsonl")),
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
        assert step.reward_mean == given[step.step]["reward_mean"]
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
        "differing_layers_histogram": [40, 8, 2],
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
        "margins": {"log10_edges": [-2.0, -1.0, 0.0], "counts_LB": [[3, 4]] * layers},
        "expert_load": {"4": 1.3},
    }
