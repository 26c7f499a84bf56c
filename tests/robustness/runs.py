"""What a training run reads and leaves: its configuration, data set, metrics and checkpoints."""

import json

import torch

from foreroute.records.runs import read_run
from foreroute.train import RunFolder, load_config, parse_config
from foreroute.train.folder import load_checkpoint
from foreroute.train.prompts import parse_row
from tests.report.report_runs import step_line
from tests.robustness.mutations import forge, forge_json, forge_line
from tests.robustness.plans import json_lines, require_unchanged, toml_target
from tests.robustness.target import Target
from tests.train.small_runs import small_values

TRAINING = small_values(name="fuzz", rollout={"precision": "bfloat16"}, rl={"routing": "R3", "learning_rate": 1e-3})
ROWS = [
    {"prompt": "What is 3 * 4?", "answer": "12"},
    {"messages": [{"role": "system", "content": "Count."}, {"role": "user", "content": "2 + 2"}], "answer": 4},
    {"prompt": "Name a colour.", "hint": ["red", 1, None]},
]
STORED = json.dumps(parse_config(TRAINING, source="fuzz").model_dump())


def run_targets(folder):
    run = folder / "run"
    run.mkdir()
    config = {"name": "fuzz", "seed": 3, "rollout": {"precision": "bfloat16"}, "rl": {"routing": "R3"}}
    (run / "config.json").write_text(json.dumps(config))

    def target(name, make, read, check, file=None, forge=forge_line, **more):
        return Target(name, make, read, file=file and folder / file, forge=forge, check=check, **more)

    def checkpoint(rng):
        return _checkpoint_bytes(rng, folder / "made")

    def parsed(raw):
        return [parse_row("rows.jsonl", line) for line in raw.removesuffix(b"\n").split(b"\n")]

    metrics = json_lines([step_line(number) for number in range(3)])
    whole = {"forge": forge, "has_checksum": True, "weight": 2}
    return [
        toml_target("training", TRAINING, load_config, _require_config, folder),
        target("data set", lambda _: json_lines(ROWS), parsed, _require_rows),
        target("resumed", lambda _: STORED.encode(), _of_this_run, _require_stored, "config.json", forge_json),
        target("metrics", lambda _: metrics, lambda _: read_run(run).steps, _require_steps, "run/metrics.jsonl"),
        target("checkpoint", checkpoint, load_checkpoint, _require_state, "checkpoint.file", **whole),
    ]


def _require_config(given, config):
    require_unchanged(given, config)
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
        # a key that is not there was not recorded; text and truth are no numbers, and NaN is no other number
        said = given[step.step].get("reward_mean")
        assert type(said) in (type(None), int, float)
        assert repr(step.reward_mean) == repr(None if said is None else float(said))
        assert type(given[step.step]["step"]) is int


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
