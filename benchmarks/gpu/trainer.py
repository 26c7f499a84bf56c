"""The reference trainer on the device: the demo's task for a few steps, with R3 and without.

step_s                       seconds of a step with R3, all stages; median, the first step left out
rollout_s, recompute_s, measure_s, update_s        the stages of it
step_none_s                  without replay
native_k3, replayed_k3       trainer against engine on the trainer's own routes, and on the rollout's
peak_memory_gb               of tensors on the device in a step; CUDA alone
reward_first, reward_last    of the first and the last step with R3; so few steps teach nothing
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from benchmarks.gpu.driving import deterministic
from benchmarks.gpu.part import Part, Skipped
from benchmarks.harness.tiny_run import same_state
from foreroute.train import RunFolder, Watcher, load_checkpoint, parse_config, train
from foreroute.train.policy import make_engine, make_policy
from foreroute.train.prompts import make_task

STAGES = ("rollout", "recompute", "measure", "update")
STEPS = 4
RESERVE_S = 12
"""A check that is not begun with less left: a few steps of a model that is bound by launches."""


def run(part: Part) -> None:
    """Train with R3 and without replay; stop and go on, here and on the other device."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with part.check("trains with R3"):
            _trains(part, folder)
        if part.checks["trains with R3"] != "passed":
            return
        with part.check("everything is on the device"):
            _is_there(part)
        with part.check("a resumed run ends with the same bits"), deterministic():
            _resumes(part, folder)
        with part.check("trains without replay"):
            _require_time(part)
            records = _run(part, folder, "none", rl={"routing": "none", "steps": 3})
            part.record(step_none_s=_median(records, sum_of=tuple(records[-1]["seconds"])))
        with part.check("a checkpoint goes on on another device"):
            _moves(part, folder)


def _trains(part: Part, folder: Path) -> None:
    records = _run(part, folder, "R3", warm=False)
    _require_sound(part, records)
    k3 = {side: [record["mismatch"][side]["k3"] for record in records] for side in ("native", "replayed")}
    part.record(
        step_s=_median(records, sum_of=tuple(records[-1]["seconds"])),
        **{f"{stage}_s": _median(records, sum_of=(stage,)) for stage in STAGES},
        native_k3=statistics.fmean(k3["native"]),
        replayed_k3=statistics.fmean(k3["replayed"]),
        reward_first=records[0]["reward_mean"],
        reward_last=records[-1]["reward_mean"],
        ran_on=records[0]["device"]["name"],
    )
    shares = [record["mismatch"]["replayed"]["differing_share"] for record in records]
    assert shares == [0.0] * len(records), f"replay was not obeyed: {shares} of routes differ from the rollout's"
    if part.device.type == "cuda":
        most = max(record["device"]["peak_memory_bytes"] for record in records)
        part.record(peak_memory_gb=most / 1e9)
        assert most > 0, "no step took any memory of the device"


def _is_there(part: Part) -> None:
    config = _config(part, "there")
    policy = make_policy(config, make_task(config), part.device)
    engine: Any = make_engine(config, policy)
    for model in (policy.model, engine._model):
        kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
        assert kinds == {part.device.type}, f"tensors of {type(model).__name__} are on {sorted(kinds)}"


def _resumes(part: Part, folder: Path) -> None:
    begins_at = _warm(folder)
    whole = folder / "whole"
    _run(part, folder, "whole")
    seen: list[Any] = []
    config = _config(part, "stopped", begins_at=begins_at)
    train(config, folder / "stopped", watcher=Watcher(on_step=seen.append, should_stop=lambda: len(seen) == 2))
    shutil.copytree(folder / "stopped", folder / "half")
    train(config, folder / "stopped", resume=True)
    if _same(whole, folder / "stopped"):
        return
    _run(part, folder, "again")
    assert not _same(whole, folder / "again"), "a run repeats itself to the bit, and a resumed one does not"
    raise Skipped("the same run does not repeat its own bits here: a kernel adds in no fixed order")


def _moves(part: Part, folder: Path) -> None:
    if part.device.type != "cuda":
        raise Skipped("there is one device")
    _require_time(part)
    half = folder / "half"
    if not half.exists():
        raise Skipped("no run was stopped half way")
    at = RunFolder(half).last_checkpoint()
    for device, steps in (("cpu", 3), (part.device.type, 4)):
        config = _config(part, "stopped", begins_at=_warm(folder), device=device, rl={"steps": steps})
        train(config, half, resume=True)
    records = RunFolder(half).records()
    assert [record["device"]["kind"] for record in records] == ["cuda", "cuda", "cpu", "cuda"], f"from {at}"
    _require_finite(records)


def _run(part: Part, folder: Path, name: str, *, warm: bool = True, **sections: Any) -> list[dict[str, Any]]:
    config = _config(part, name, begins_at=_warm(folder) if warm else None, **sections)
    return train(config, folder / name).records()


def _config(part: Part, name: str, *, begins_at: Path | None = None, **sections: Any) -> Any:
    """The demo's, with less of a warm start, and smaller where the part is not run in full."""
    text = (files("foreroute.cli") / "arithmetic.toml").read_text(encoding="utf-8")
    values = tomllib.loads(text) | {"name": name, "device": part.device.type}
    few = {"prompts": 32, "group_size": 8} if part.full else {"prompts": 4, "group_size": 8}
    values["rollout"] |= few
    values["rl"] |= {"steps": STEPS}
    values["checkpoint"] = {"every": 2, "keep": 99}
    values["measure"] = {"save_trace_every": 2}
    values["warm_start"] = {"max_steps": 150 if part.full else 20, "batch_size": 128 if part.full else 32}
    if not part.full:
        values["model"]["sizes"] |= {"num_hidden_layers": 2, "num_experts": 16}
    if begins_at is not None:
        values["warm_start"] = {"checkpoint": str(begins_at)}
    for key, section in sections.items():
        values[key] = {**values.get(key, {}), **section} if isinstance(section, dict) else section
    return parse_config(values, source="the demo's configuration")


def _warm(folder: Path) -> Path:
    """The weights that the first run began with after its warm start."""
    return folder / "R3" / "checkpoints" / "step-000000.safetensors"


def _same(one: Path, other: Path) -> bool:
    first, second = (RunFolder(path) for path in (one, other))
    ours, theirs = ([_compared(record) for record in run.records()] for run in (first, second))
    last = [run.last_checkpoint() for run in (first, second)]
    assert all(last), "a run that ended has a checkpoint"
    return ours == theirs and same_state(*(load_checkpoint(path) for path in last if path))


def _compared(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("seconds", "device")}


def _median(records: Sequence[dict[str, Any]], *, sum_of: tuple[str, ...]) -> float:
    """Of all steps but the first, which compiles and allocates."""
    later = [sum(record["seconds"].get(stage, 0.0) for stage in sum_of) for record in records[1:]]
    return float(statistics.median(later))


def _require_sound(part: Part, records: Sequence[dict[str, Any]]) -> None:
    kinds = {record["device"]["kind"] for record in records}
    assert kinds == {part.device.type}, f"steps ran on {sorted(kinds)}"
    _require_finite(records)
    assert any(record["grad_norm"] > 0 for record in records), "no step had a gradient"


def _require_finite(records: Sequence[dict[str, Any]]) -> None:
    for record in records:
        figures = (record["reward_mean"], record["loss"], record["grad_norm"])
        assert all(map(math.isfinite, figures)), f"step {record['step']}: reward, loss, gradient are {figures}"


def _require_time(part: Part) -> None:
    if part.seconds_left < (RESERVE_S if part.full else 0):
        raise Skipped("the part's time was used up")
