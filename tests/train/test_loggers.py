"""TensorBoard and Weights & Biases get the numbers of metrics.jsonl, each step once, however a run was interrupted."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from foreroute.errors import ConfigError, RunFolderError
from foreroute.train import RunFolder, Watcher, recorder, train
from foreroute.train.recorder import open_loggers, scalars
from tests.train.small_runs import records, small_config

RECORD = {
    "step": 3,
    "trained_with": "replayed",
    "reward_mean": 0.5,
    "mismatch": {"native": {"f2": 0.25, "by_layer": [0.1, 0.2]}},
    "expert_load": {"4": 1.5},
    "live_agreement": [1.0, 0.75],
    "alarms": [{"kind": "f2", "since": 1, "value": 0.3, "threshold": 0.1}],
    "seconds": {"rollout": 1},
}
VALUES = {
    "reward_mean": 0.5,
    "mismatch/native/f2": 0.25,
    "expert_load/4": 1.5,
    "live_agreement/0": 1.0,
    "live_agreement/1": 0.75,
    "alarms": 1,
    "seconds/rollout": 1,
}


def test_single_numbers_have_paths():
    assert scalars(RECORD) == VALUES


def test_what_is_not_installed_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "find_spec", lambda package: None)
    for package in ("tensorboard", "wandb"):
        with pytest.raises(ConfigError, match=rf"logging\.{package} = true needs .*pip install '\.\[{package}\]'"):
            train(small_config(logging={package: True}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


class StandIn:
    """What the trainer uses of wandb: runs by id, which refuse to go back, as the real ones do."""

    def __init__(self):
        self.runs, self.started = {}, []

    def init(self, **given):
        self.started.append(given)
        history = self.runs.setdefault(given["id"], {})

        def log(values, step):
            assert step == len(history), "steps follow each other"
            history[step] = values

        return SimpleNamespace(step=len(history), log=log, finish=lambda: None)


def test_wandb_runs_go_on_where_they_were(tmp_path, monkeypatch):
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    run, config = RunFolder(tmp_path), small_config(logging={"wandb": True, "wandb_mode": "offline"})

    def log(first, last):
        [logger] = open_loggers(config, run, first)
        for step in range(first, last):
            logger.log(step, {"reward_mean": step / 10})
        logger.close()

    log(0, 4)
    log(2, 6)  # killed at step 4, and resumed from the checkpoint of step 2
    [identity] = stand_in.runs
    assert stand_in.runs[identity] == {step: {"reward_mean": step / 10} for step in range(6)}
    first, second = stand_in.started
    assert first == second
    assert (first["mode"], first["project"], first["name"]) == ("offline", "foreroute", "small")
    assert first["config"]["rl"]["steps"] == 5


@pytest.mark.parametrize("content", [b"", b"0123456789a", b"0123456789AB", b"../../secret", b"\xff" * 12, None])
def test_a_damaged_id_of_a_wandb_run_is_named(tmp_path, monkeypatch, content):
    monkeypatch.setitem(sys.modules, "wandb", stand_in := StandIn())
    path = tmp_path / "wandb-id"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"wandb-id is (damaged: it holds|not text|a folder)"):
        open_loggers(small_config(logging={"wandb": True}), RunFolder(tmp_path), 0)
    assert not stand_in.started


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run that went on for a step after its last checkpoint, and was then taken up again."""
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("tensorboard") / "run"
    config = small_config(
        rl={"steps": 4},
        task={"min_operands": 2, "max_operands": 2},
        warm_start={"max_steps": 1},
        logging={"tensorboard": True},
        measure={"compare_every": 100},
    )

    def end(record):
        if record["step"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, folder, watcher=Watcher(on_step=end))
    return train(config, folder, resume=True)


def test_tensorboard_has_every_number_of_every_step_once(killed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(list((killed.path / "tensorboard").iterdir())) == 2
    events = EventAccumulator(str(killed.path / "tensorboard")).Reload()
    lines = [json.loads(line) for line in (killed.path / "metrics.jsonl").read_text().splitlines()]
    for name in scalars(lines[0]):
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert len(events.Scalars(name)) == len(shown)
        expected = {line["step"]: scalars(line)[name] for line in lines if name in scalars(line)}
        assert shown.keys() == expected.keys()
        np.testing.assert_allclose(list(shown.values()), list(expected.values()), rtol=1e-6)
    assert [record["step"] for record in records(killed.path)] == [0, 1, 2, 3]


def test_logging_changes_nothing(killed, tmp_path):
    config = small_config(**{**json.loads((killed.path / "config.json").read_text()), "logging": {}})
    assert records(train(config, tmp_path / "silent").path) == records(killed.path)
    with pytest.raises(RunFolderError, match="cannot be written"):
        replace_folder_by_a_file(tmp_path)


def replace_folder_by_a_file(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    open_loggers(small_config(logging={"tensorboard": True}), RunFolder(tmp_path), 0)
