"""Rollbacks: a run goes back to an earlier checkpoint, and goes on from there in another way.

rollbacks.json                what was gone back to, and why
rolled-back-1/                the metrics, checkpoints and traces that the first rollback took out of the run

The file is written first. Whoever opens a folder in which the rest was not finished finishes it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from foreroute.errors import RunFolderError
from foreroute.files import write_atomically
from foreroute.train.config import TrainConfig
from foreroute.train.run_folder import RunFolder, writing

NUMBERED = re.compile(r"step-(\d{6})(\.\w+)?")


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """One of them.

    Attributes:
        number: from 1.
        at_step: the step whose alarms led to it; the last that is taken out of the run.
        to_step: that of the checkpoint; the first step that runs again.
        because: the alarms in words.
        skipped_steps: steps of data that were passed over so far: step s uses what step s + skipped_steps would have.
    """

    number: int
    at_step: int
    to_step: int
    because: str
    skipped_steps: int


def read_rollbacks(run: RunFolder) -> list[Rollback]:
    """Those of a run, in order.

    Raises:
        RunFolderError: when rollbacks.json is damaged.
    """
    return _read(run)[0]


def roll_back(run: RunFolder, rollback: Rollback) -> None:
    """Take what follows the checkpoint out of the run, and keep it aside."""
    _store(run, [*read_rollbacks(run), rollback], settled=False)
    settle(run)


def settle(run: RunFolder) -> None:
    """Finish the last rollback, if that is not done."""
    rollbacks, settled = _read(run)
    if settled:
        return
    last = rollbacks[-1]
    aside = run.path / f"rolled-back-{last.number}"
    with writing(aside / "metrics.jsonl") as path:
        if not path.exists():
            lines = [json.dumps(record) + "\n" for record in run.metrics() if record["step"] >= last.to_step]
            write_atomically(path, "".join(lines))
    run.forget_metrics_from(last.to_step)
    for name, first in (("checkpoints", last.to_step + 1), ("traces", last.to_step)):
        _move(run.path / name, aside / name, first)
    _store(run, rollbacks, settled=True)


def as_rolled_back(config: TrainConfig, rollbacks: list[Rollback]) -> TrainConfig:
    """The configuration that a run goes on with: after a rollback, one that replays the rollout's routes."""
    if not rollbacks or config.rl.routing in ("R3", "R3+weights"):
        return config
    return config.model_copy(update={"rl": config.rl.model_copy(update={"routing": "R3"})})


def _move(source: Path, target: Path, first: int) -> None:
    found = [(path, NUMBERED.fullmatch(path.name)) for path in source.iterdir()] if source.is_dir() else []
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        for path, match in found:
            if match and int(match[1]) >= first:
                os.replace(path, target / path.name)


def _read(run: RunFolder) -> tuple[list[Rollback], bool]:
    path = run.path / "rollbacks.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return [Rollback(**values) for values in stored["rollbacks"]], bool(stored["settled"])
    except FileNotFoundError:
        return [], True
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} is damaged ({error}); restore it from a copy") from error


def _store(run: RunFolder, rollbacks: list[Rollback], *, settled: bool) -> None:
    text = json.dumps({"settled": settled, "rollbacks": [asdict(each) for each in rollbacks]}, indent=2)
    with writing(run.path / "rollbacks.json") as path:
        write_atomically(path, text)
