"""What a training run reads and leaves: its configuration, data set, metrics and checkpoints."""

import json

import torch

from foreroute.mismatch import LOG10_EDGES
from foreroute.records import read_run
from foreroute.train import RunFolder, load_checkpoint, load_config, parse_config
from foreroute.train.prompts import parse_row
from tests.robustness.mutations import forge, forge_json
from tests.robustness.target import Target
from tests.robustness.texts import json_lines, require_unchanged, toml_target
from tests.train.small_runs import small_values

TRAINING = small_values(
    name="fuzz",
    seed=3,
    rollout={"temperature": 1.0, "precision": "bfloat16"},
    rl={"routing": "R3", "learning_rate": 1e-3},
)
ROWS = [
    {"prompt": "What is 3 * 4?", "answer": "12"},
    {"messages": [{"role": "system", "content": "Count."}, {"role": "user", "content": "2 + 2"}], "answer": 4},
    {"prompt": "Name a colour.", "hint": ["red", 1, None]},
]

STORED = json.dumps(parse_config(TRAINING, source="fuzz").model_dump())


def run_targets(folder):
    """Their readers."""
    run = folder / "run"
    run.mkdir()
    config = {"name": "fuzz", "seed": 3, "rollout": {"precision": "bfloat16"}, "rl": {"routing": "R3"}}
    (run / "config.json").write_text(json.dumps(config))
    return [
        toml_target("training", TRAINING, load_config, _require_config, folder),
        Target(
            "data set",
            lambda rng: json_lines(ROWS),
            lambda raw: [parse_row("rows.jsonl", line) for line in raw.removesuffix(b"\n").split(b"\n")],
            forge=forge_line,
            check=_require_rows,
        ),
        Target(
            "metrics, reported",
            _metrics_bytes,
            lambda path: read_run(run).steps,
            file=run / "metrics.jsonl",
            forge=forge_line,
            check=_require_steps,
        ),
        Target(
            "metrics, resumed",
            _metrics_bytes,
            lambda path: RunFolder(folder).records(),
            file=folder / "metrics.jsonl",
            forge=forge_line,
            check=lambda raw, records: [record["step"] for record in records] == list(range(len(records))),
        ),
        Target(
            "configuration, resumed",
            lambda rng: STORED.encode(),
            _of_this_run,
            file=folder / "config.json",
            forge=forge_json,
            check=_require_stored,
        ),
        Target(
            "checkpoint",
            lambda rng: _checkpoint_bytes(rng, folder / "made"),
            load_checkpoint,
            file=folder / "checkpoint.file",
            forge=forge,
            check=_require_state,
            has_checksum=True,
            weight=2,
        ),
    ]


def forge_line(raw, rng):
    """One line forged, dropped, doubled or moved."""
    lines = raw.split(b"\n")[:-1]
    place = int(rng.integers(len(lines)))
    chosen = rng.random()
    if chosen < 0.1:
        del lines[place]
    elif chosen < 0.2:
        lines.append(lines[place])
    else:
        lines[place] = forge_json(lines[place], rng)
    return b"\n".join(lines) + b"\n"


def _require_config(given, config):
    require_unchanged(given, config)
    assert config.rl.steps >= 1
    assert config.name not in ("", ".", "..")
    assert "/" not in config.name


def _require_rows(raw, rows):
    lines = [line for line in raw.split(b"\n") if line]
    assert len(rows) == len(lines)
    for values, line in zip(rows, lines, strict=True):
        given = json.loads(line)
        assert ("prompt" in given) != ("messages" in given)
        assert values == given
        texts = [given["prompt"]] if "prompt" in given else [m["content"] for m in given["messages"]]
        assert all(isinstance(text, str) for text in texts)


def _require_steps(raw, steps):
    """The steps are those from 0 on."""
    assert [step.step for step in steps] == list(range(len(steps)))
    given = {}
    for line in raw.split(b"\n"):
        try:
            values = json.loads(line)
            given[values["step"]] = values
        except (ValueError, KeyError, TypeError):  # a torn last line, which is left out and said so
            continue
    for step in steps:
        # a key that is not there was not recorded; an integer stays one, and NaN is no other number
        assert repr(step.reward_mean) == repr(given[step.step].get("reward_mean"))
        assert type(given[step.step]["step"]) is int


def _metrics_bytes(rng):
    return json_lines([_step(number, 0.1) for number in range(3)])


def _step(number, reward):
    layers, response_tokens = 2, 40
    mismatch = {
        "response_tokens": response_tokens,
        "k3": 0.02,
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
        "reward_mean": reward,
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


def _of_this_run(path):
    """What a configuration says, when a run is taken up with it that has recorded nothing."""
    (path.parent / "metrics.jsonl").unlink(missing_ok=True)
    RunFolder(path.parent).require_begun(parse_config(TRAINING, source="fuzz"))
    return path.read_bytes().decode()


def _require_stored(raw, text):
    given, expected = json.loads(text), json.loads(STORED)
    for values in (given, expected):
        for name in ("device", "parallel", "checkpoint"):
            values.pop(name, None)
        values["rl"].pop("steps", None)
    assert given == expected


def _checkpoint_bytes(rng, path):
    seed = torch.Generator().manual_seed(int(rng.integers(2**31)))
    weights = {f"layer.{n}.weight": torch.randn(3, 4, generator=seed) for n in range(3)}
    state = {
        "step": int(rng.integers(0, 50)),
        "model": weights,
        "optimizer": {"state": {0: {"step": torch.tensor(4.0), "exp_avg": torch.randn(3, 4, generator=seed)}}},
    }
    written = RunFolder(path).save_checkpoint(state, data="ab" * 16, keep=1)
    content = written.read_bytes()
    written.unlink()  # a later step's would have it removed
    return content


def _require_state(raw, state):
    assert type(state["step"]) is int
    assert state["step"] >= 0
    assert all(isinstance(weight, torch.Tensor) for weight in state["model"].values())
