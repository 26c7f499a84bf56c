"""What a run does about its alarms: warn, stop, or roll back to an earlier checkpoint. `mismatch` raises the alarms.

rollbacks.json                what was gone back to, and why
rolled-back-1/                the metrics, checkpoints, rollouts and traces that the first rollback took out of the run

The file is written first. Whoever opens a folder in which the rest was not finished finishes it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from foreroute.errors import CollapseError, DivergedError, RunFolderError
from foreroute.files import read_text, write_atomically
from foreroute.mismatch import Alarm, Signals, alarms, trouble_began
from foreroute.records import Rollback
from foreroute.train.config import AlarmsConfig, TrainConfig
from foreroute.train.metrics_file import writing
from foreroute.train.ranks import Ranks
from foreroute.train.run_folder import RunFolder

_SIGNALS = TypeAdapter(Signals)
_ALARMS = TypeAdapter(list[Alarm])


class AlarmActions:
    """Acts on the alarms of a run. Made on all ranks; rank 0 knows the records and decides.

    Args:
        config: the rules and the action.
        run: its folder, with the metrics of the steps before.
        ranks: of the run.
        step: the next. What the metrics have of it and of later ones runs again.

    Raises:
        RunFolderError: when figures or alarms of a step before are none.
    """

    def __init__(self, config: AlarmsConfig, run: RunFolder, ranks: Ranks, step: int) -> None:
        self._config, self._run, self._ranks = config, run, ranks
        self._rules = config.rules()
        self._rollbacks = read_rollbacks(run)
        past = run.metrics.records()[:step] if ranks.rank == 0 else []
        self._history: list[Signals] = []
        self._alarms: dict[int, list[Alarm]] = {}
        for record in past:
            signals, found = _signals_and_alarms(run, record)
            self._history.append(signals)
            self._alarms[record["step"]] = found
        self._rolled_back = False

    def examine(self, record: dict[str, Any]) -> None:
        """Add the alarms that are on to a step's record, and how often the run was rolled back if it was."""
        self._history.append(Signals.of(record))
        found = alarms(self._history, self._rules)
        self._alarms[record["step"]] = found
        record["alarms"] = [asdict(alarm) for alarm in found]
        if self._rollbacks:
            record["rollbacks"] = len(self._rollbacks)

    def act(self, step: int) -> bool:
        """Do what the configuration says about the alarms of a step that is recorded. A collective call.

        Returns:
            Whether the run was rolled back; it is then to begin again from its last checkpoint.

        Raises:
            CollapseError: when the run is to end.
        """
        if self._config.action == "warn":
            return False
        self._ranks.on_rank_0("acting on alarms", lambda: self._act(step))
        return bool(self._ranks.max([self._rolled_back])[0])

    def act_on_divergence(self, step: int, error: DivergedError) -> bool:
        """As `act`, for a step that was not finished because numbers are not finite.

        Raises:
            DivergedError: as it was, unless the action is to roll back.
        """
        if self._config.action != "rollback":
            raise error
        self._alarms[step] = [Alarm(kind="collapse", since=step, value=math.nan, threshold=math.inf)]
        self._ranks.on_rank_0("acting on alarms", lambda: self._roll_back(step, str(error)))
        return True

    def _act(self, step: int) -> None:
        found = [alarm for alarm in self._alarms[step] if alarm.kind in self._config.act_on]
        if not found:
            return
        because = "; ".join(map(str, found))
        if self._config.action == "stop":
            raise CollapseError(
                f'step {step}: {because}. The run was ended by alarms.action = "stop"; its last checkpoint is '
                f'{self._run.last_checkpoint()}. Resume with "warn" to go on as it is, or with "rollback"'
            )
        self._roll_back(step, because)

    def _roll_back(self, step: int, because: str) -> None:
        done = len(self._rollbacks)
        if done == self._config.max_rollbacks:
            raise CollapseError(
                f"step {step}: {because}. The run was rolled back {'once' if done == 1 else f'{done} times'} already "
                f"(alarms.max_rollbacks = {done}); "
                "lower rl.learning_rate or rl.mini_steps, and start in another folder"
            )
        began = trouble_began(self._alarms, step, quiet=self._config.window)
        to_step = self._run.checkpoint_step_before(began)
        before = self._rollbacks[-1].skipped_steps if self._rollbacks else 0
        rollback = Rollback(
            number=done + 1,
            at_step=step,
            to_step=to_step,
            because=because,
            skipped_steps=before + step + 1 - to_step,
        )
        roll_back(self._run, rollback)
        self._rolled_back = True


def _signals_and_alarms(run: RunFolder, record: Mapping[str, Any]) -> tuple[Signals, list[Alarm]]:
    """Read what a line of metrics says about its step."""
    try:
        signals = Signals.of(record)
        _SIGNALS.validate_json(json.dumps(asdict(signals)), strict=True)
        return signals, _ALARMS.validate_json(json.dumps(record["alarms"]), strict=True)
    except (AttributeError, LookupError, TypeError, ValidationError) as error:
        raise RunFolderError(
            f"{run.metrics.path}, line {record['step'] + 1} is damaged: its alarms, or the figures that alarms "
            "look at, are none. Restore the file from a copy"
        ) from error


@dataclass(frozen=True)
class _Stored:
    """What rollbacks.json holds; `settled` says whether the last one was finished."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    settled: bool
    rollbacks: list[Rollback]


_STORED = TypeAdapter(_Stored)


def read_rollbacks(run: RunFolder) -> list[Rollback]:
    """Read the rollbacks of a run, in order.

    Raises:
        RunFolderError: when rollbacks.json is damaged, or gone.
    """
    return _read(run)[0]


def roll_back(run: RunFolder, rollback: Rollback) -> None:
    """Take what follows the checkpoint out of the run, and keep it aside."""
    _store(run, [*read_rollbacks(run), rollback], settled=False)
    finish_rollback(run)


def finish_rollback(run: RunFolder) -> None:
    """Finish the last rollback, if that is not done."""
    rollbacks, settled = _read(run)
    if settled:
        return
    last = rollbacks[-1]
    first = {"checkpoints": last.to_step + 1, "rollouts": last.to_step, "traces": last.to_step}
    run.put_aside(run.path / f"rolled-back-{last.number}", first, metrics_from=last.to_step)
    _store(run, rollbacks, settled=True)


def require_matching_metrics(run: RunFolder) -> None:
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
    """Give the configuration that a run goes on with: after a rollback it replays the rollout's routes."""
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
