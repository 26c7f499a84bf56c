"""Rollbacks: a run goes back to an earlier checkpoint, and goes on from there in another way.

rollbacks.json                what was gone back to, and why
rolled-back-1/                the metrics, checkpoints, rollouts and traces that the first rollback took out of the run

The file is written first. Whoever opens a folder in which the rest was not finished finishes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from foreroute.errors import RunFolderError
from foreroute.files import read_text, write_atomically
from foreroute.train.config import TrainConfig
from foreroute.train.metrics_file import writing
from foreroute.train.run_folder import RunFolder


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


@dataclass(frozen=True)
class _Stored:
    """What rollbacks.json holds; `settled` says whether the last one was finished."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    settled: bool
    rollbacks: list[Rollback]


_STORED = TypeAdapter(_Stored)


def read_rollbacks(run: RunFolder) -> list[Rollback]:
    """Those of a run, in order.

    Raises:
        RunFolderError: when rollbacks.json is damaged, or gone.
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
    first = {"checkpoints": last.to_step + 1, "rollouts": last.to_step, "traces": last.to_step}
    run.put_aside(run.path / f"rolled-back-{last.number}", first, metrics_from=last.to_step)
    _store(run, rollbacks, settled=True)


def require_fit(run: RunFolder) -> None:
    """Make sure that the metrics of a run are of these rollbacks: each line says how many there were before it.

    Raises:
        RunFolderError: when a line says otherwise.
    """
    rollbacks = read_rollbacks(run)
    for record in run.metrics.records():
        step = record["step"]
        # what a rollback took out was written before it, and what it left was too
        expected = max((each.number for each in rollbacks if each.to_step <= step), default=0)
        if record.get("rollbacks", 0) != expected:
            raise RunFolderError(
                f"{run.path / 'rollbacks.json'} and line {step + 1} of metrics.jsonl disagree: rollbacks before it "
                f"were {expected} and {record.get('rollbacks', 0)!r:.40}. Restore both from a copy"
            )


def as_rolled_back(config: TrainConfig, rollbacks: list[Rollback]) -> TrainConfig:
    """The configuration that a run goes on with: after a rollback, one that replays the rollout's routes."""
    if not rollbacks or config.rl.routing in ("R3", "R3+weights"):
        return config
    return config.model_copy(update={"rl": config.rl.model_copy(update={"routing": "R3"})})


def _read(run: RunFolder) -> tuple[list[Rollback], bool]:
    path = run.path / "rollbacks.json"
    if os.path.lexists(path):
        stored = _parsed(path)
        rollbacks, settled = stored.rollbacks, stored.settled
    else:
        rollbacks, settled = [], True
    aside = run.path / f"rolled-back-{len(rollbacks) + 1}"
    if os.path.lexists(aside):
        raise RunFolderError(f"{aside} is there, and {path} knows nothing of it; restore that file from a copy")
    return rollbacks, settled


def _parsed(path: Path) -> _Stored:
    text = read_text(path, RunFolderError)
    try:
        stored = _STORED.validate_json(text)
        _check(stored)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RunFolderError(f"{path} is damaged ({place}: {first['msg']}); restore it from a copy") from error
    except RunFolderError as error:
        raise RunFolderError(f"{path} is damaged ({error}); restore it from a copy") from error
    return stored


def _check(stored: _Stored) -> None:
    """Raises RunFolderError where numbers are not what `Rollback` says."""
    if not stored.settled and not stored.rollbacks:
        raise RunFolderError("it says that a rollback was begun, and has none")
    for number, (before, each) in enumerate(zip([None, *stored.rollbacks], stored.rollbacks, strict=False), 1):
        skipped = (before.skipped_steps if before else 0) + each.at_step + 1 - each.to_step
        if each.number != number or not 0 <= each.to_step <= each.at_step or each.skipped_steps != skipped:
            raise RunFolderError(f"the numbers of rollback {number} contradict each other")


def _store(run: RunFolder, rollbacks: Sequence[Rollback], *, settled: bool) -> None:
    text = json.dumps({"settled": settled, "rollbacks": [asdict(each) for each in rollbacks]}, indent=2)
    path = run.path / "rollbacks.json"
    with writing(path):
        write_atomically(path, text)
