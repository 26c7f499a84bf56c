"""Runs the parts, each in a process of its own, and puts what they found into one JSON and one page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreroute.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = 530
"""Nine minutes, less what the start and the page take."""
GRACE_S = 10
"""A part looks at the time between its checks; one that goes on for so many seconds more is ended."""
LEAST_S = 5
"""A part that has less left is not begun."""
LIBRARY = ("numpy", "safetensors", "torch", "transformers", "numba", "zstandard")
"""What importing the library and its Hugging Face adapter takes."""


@dataclass(frozen=True)
class PartSpec:
    """A part before it runs.

    Attributes:
        shows: what it is about, for the page.
        seconds: it is ended after so many on a GPU.
        needs: names to import without which it is skipped.
    """

    shows: str
    seconds: int
    needs: tuple[str, ...] = LIBRARY


PARTS = {
    "bits": PartSpec("own routes replayed are the unpatched model, foreign ones are obeyed", 145),
    "cost": PartSpec("time and memory of replay and recording over the unpatched model", 105),
    "jobs": PartSpec("CUDA graphs, fused kernels and compilation: they work, or are refused by name", 85),
    "mismatch": PartSpec("how far rollout and trainer are apart on this device, without and with replay", 50),
    "trainer": PartSpec("the reference trainer on the device", 55, (*LIBRARY, "pydantic")),
    "transfers": PartSpec("expert weights from host memory, and what of it hides behind compute", 50),
    "planning": PartSpec("a plan for 64 ranks on all cores", 50),
    "megatron": PartSpec("replay in Megatron-Core's schedule", 45, (*LIBRARY, "megatron.core")),
}


def run(parts: Sequence[str], device: str, folder: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """Run these parts, and write `gpu.json` into the folder, anew after every part, and `gpu.html` after the last.

    Args:
        parts: names of PARTS.
        device: as torch spells it.
        folder: made if it is not there.
        env: versions and machine, for the page.

    Returns:
        `parts`, each "passed", "failed: why" or "skipped: why"; `metrics`, the figures of each; `checks`, the outcome
        of each check of each; `seconds` of each; `full`, whether sizes were those that the parts are about.
    """
    folder = folder.resolve()  # parts work elsewhere
    folder.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + TOTAL_S
    report: dict[str, Any] = {"device": device, "full": device.startswith("cuda"), **_described(device)}
    report["env"] = {**env, **report["env"]}
    report |= {"parts": {}, "metrics": {}, "checks": {}, "seconds": {}}

    def one(name: str) -> tuple[str, dict[str, Any], float]:
        begun = time.monotonic()
        found = _run_part(name, device, folder, ends_at)
        return name, found, time.monotonic() - begun

    # on a GPU one at a time, for the figures; on a CPU nobody reads them
    with ThreadPoolExecutor(1 if device.startswith("cuda") else 2) as pool:
        for name, found, seconds in pool.map(one, parts):
            report["parts"][name] = found["outcome"]
            report["metrics"][name] = found["figures"]
            report["checks"][name] = found["checks"]
            report["seconds"][name] = round(seconds, 1)
            print(f"{name:<10} {seconds:5.1f} s  {found['outcome']}", file=sys.stderr, flush=True)
            (folder / "gpu.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    _write_page(report, folder / "gpu.html")
    return report


def _write_page(report: Mapping[str, Any], target: Path) -> None:
    """Write the page, or say why there is none: a machine without the extra `report` has its figures in gpu.json."""
    try:
        from benchmarks.gpu.page import page_of
        from foreroute.report.page import write_page

        write_page(target, page_of(report, {name: spec.shows for name, spec in PARTS.items()}))
    except (ImportError, InputError) as error:
        print(f"no page: {error}", file=sys.stderr)


def _run_part(name: str, device: str, folder: Path, ends_at: float) -> dict[str, Any]:
    """What it found. A part that ends otherwise than by itself failed, with all that it had saved."""
    nothing: dict[str, Any] = {"outcome": "failed: it saved nothing", "figures": {}, "checks": {}}
    seconds = min(PARTS[name].seconds, ends_at - time.monotonic())
    if seconds < LEAST_S:
        return nothing | {"outcome": "skipped: the time of the whole run was used up"}
    file, log = folder / f"{name}.json", folder / f"{name}.log"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", name]
    command += ["--device", device, "--seconds", str(seconds), "--file", str(file)]
    command += ["--full"] * device.startswith("cuda")
    command += ["--needs", *PARTS[name].needs]
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=stream,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=_environment(),
            start_new_session=True,
        )
        try:
            code = process.wait(seconds + GRACE_S)
            ended = _ending(code)
        except subprocess.TimeoutExpired:
            ended = f"it was ended after {seconds + GRACE_S:.0f} s"
        finally:
            _end(process)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else dict(nothing)
    if ended:
        before = f"; {found['outcome']}" if found["checks"] and found["outcome"].startswith("failed") else ""
        found["outcome"] = f"failed: {ended}, see {log.name}{before}"
    return found


def _described(device: str) -> dict[str, Any]:
    """`device_name` and `env`, from a process of its own: this one never touches the device."""
    code = f"import benchmarks.gpu.device as device; device.describe({device!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=_environment())
    if done.returncode:
        raise SystemExit(
            (done.stderr.strip().splitlines() or [f"the device cannot be described: {done.returncode}"])[-1]
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    """Of the children: the checkout at hand comes before whatever is installed, and nothing is fetched."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def _ending(code: int) -> str:
    """Nothing for the one that is well."""
    if code < 0:
        return f"it died of {signal.Signals(-code).name}"
    return f"it ended with exit code {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """It, and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
