"""Who watches a run's alarms, and acts on them. What sets them off is in `mismatch/alarm_rules.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from foreroute.errors import CollapseError, DivergedError, RunFolderError
from foreroute.mismatch import Alarm, Signals, alarms, trouble_began
from foreroute.train.config import AlarmsConfig
from foreroute.train.ranks import Ranks
from foreroute.train.rollback import Rollback, read_rollbacks, roll_back
from foreroute.train.run_folder import RunFolder

_SIGNALS = TypeAdapter(Signals)
_ALARMS = TypeAdapter(list[Alarm])


class Guard:
    """Made on all ranks; rank 0 knows the records and decides.

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
            signals, found = _read(run, record)
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
        self._ranks.first("acting on alarms", lambda: self._act(step))
        return bool(self._ranks.most([self._rolled_back])[0])

    def survive(self, step: int, error: DivergedError) -> bool:
        """As `act`, for a step that was not finished because numbers are not finite.

        Raises:
            DivergedError: as it was, unless the action is to roll back.
        """
        if self._config.action != "rollback":
            raise error
        self._alarms[step] = [Alarm(kind="collapse", since=step, value=math.nan, threshold=math.inf)]
        self._ranks.first("acting on alarms", lambda: self._roll_back(step, str(error)))
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


def _read(run: RunFolder, record: Mapping[str, Any]) -> tuple[Signals, list[Alarm]]:
    """What a line of metrics says about its step."""
    try:
        signals = Signals.of(record)
        _SIGNALS.validate_json(json.dumps(asdict(signals)), strict=True)
        return signals, _ALARMS.validate_json(json.dumps(record["alarms"]), strict=True)
    except (AttributeError, LookupError, TypeError, ValidationError) as error:
        raise RunFolderError(
            f"{run.metrics.path}, line {record['step'] + 1} is damaged: its alarms, or the figures that alarms "
            "look at, are none. Restore the file from a copy"
        ) from error
