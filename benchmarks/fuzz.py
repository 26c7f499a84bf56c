"""Malformed inputs for everything that reads what others wrote: no crash, no hang, no memory, nothing accepted unseen.

A target is a reader with a maker of valid inputs. Every second input is damage: changed, cut, moved or added bytes.
The others are forgeries, where a target has them: right syntax and right checksums over columns replaced by staircases
that wrap, extremes, permutations, and values of another type. A damaged file that has a checksum MUST be refused or
read with exactly the same content. A forgery, and damage to what has no checksum, MUST be refused or follow every rule
of its format.

Readers run in child processes: with numba's bounds checks, in a limited address space, and watched. A child that dies
is a crash, one that stands still is a hang; both are counted, and the attack goes on behind that input.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzzing.child import AT, BATCH
from benchmarks.fuzzing.target import Verdict, load_group

GROUPS = (
    "benchmarks.fuzzing.runs:run_targets",
    "benchmarks.fuzzing.traces:trace_targets",
    "benchmarks.fuzzing.plans:plan_targets",
    "benchmarks.fuzzing.wires:wire_targets",
    "benchmarks.fuzzing.texts:text_targets",
)
"""Slow to import first."""
INPUTS, QUICK_INPUTS = 1_000_000, 8_000
SEED = 1
PARTS = 4
"""Each group is attacked by so many children in turn, so that the groups share the cores evenly."""
SILENT_S = 20.0
"""A case that takes longer is a hang. Valid inputs take milliseconds; the rest is for a busy machine."""
START_S = 300.0
"""For a child to import what its cases need, or to make a valid input, for which kernels are compiled on first use."""
MOST_FAILURES = 20
"""Listed of each target, and the number of times a child that dies is started again."""


@dataclass
class Tally:
    """What became of the inputs of one target."""

    verdicts: Counter[str] = field(default_factory=Counter)
    crashes: int = 0
    hangs: int = 0
    extra_mb: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)


MUST_BE = dict.fromkeys(("crashes", "hangs", "accepted_wrong", "tracebacks", "over_memory"), 0)
"""Metrics of a run in which all is well."""


def run(quick: bool) -> dict[str, Any]:
    """Attack all readers."""
    return attack_all(QUICK_INPUTS if quick else INPUTS)


def attack_all(inputs: int, *, groups: Sequence[str] = GROUPS, seed: int = SEED) -> dict[str, Any]:
    """Give the readers of some groups together `inputs` malformed inputs, or a few more."""
    start = time.perf_counter()
    jobs = list(_jobs(inputs, groups))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(lambda job: _attack(job[0], job[1], seed), jobs))
    tallies: dict[str, Tally] = {}
    for part in parts:
        for name, tally in part.items():
            _add(tallies.setdefault(name, Tally()), tally)
    verdicts = sum((tally.verdicts for tally in tallies.values()), Counter[str]())
    crashes, hangs = sum(t.crashes for t in tallies.values()), sum(t.hangs for t in tallies.values())
    metrics = {
        "inputs": verdicts.total() + crashes + hangs,
        "crashes": crashes,
        "hangs": hangs,
        "accepted_wrong": verdicts[Verdict.ACCEPTED_WRONG],
        "tracebacks": verdicts[Verdict.TRACEBACK],
        "over_memory": verdicts[Verdict.MEMORY],
        "refused": verdicts[Verdict.REFUSED],
        "same": verdicts[Verdict.SAME],
        "plausible": verdicts[Verdict.PLAUSIBLE],
        "extra_mb": max(t.extra_mb for t in tallies.values()),
        "seconds": round(time.perf_counter() - start, 1),
    }
    return {
        "metrics": metrics,
        "baselines": {},
        "targets": {name: {**vars(tally), "verdicts": dict(tally.verdicts)} for name, tally in tallies.items()},
    }


def _jobs(inputs: int, names: Sequence[str]) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """For each child its group, and of each target the first case and the number of cases."""
    groups = {name: load_group(name, Path("unused")) for name in names}
    total = sum(target.weight for targets in groups.values() for target in targets)
    parts = PARTS if inputs > QUICK_INPUTS else 1
    for part in range(parts):
        for name, targets in groups.items():
            jobs = []
            for target in targets:
                share = -(-int(inputs * target.weight / total) // (parts * BATCH)) * BATCH
                jobs.append((target.name, part * share, share))
            yield name, jobs


def _attack(group: str, jobs: list[tuple[str, int, int]], seed: int) -> dict[str, Tally]:
    """All cases of the jobs, in as many children as it takes."""
    tallies = {name: Tally() for name, _, _ in jobs}
    left = [job for job in jobs if job[2]]
    with tempfile.NamedTemporaryFile() as page:
        page.truncate(AT.size)
        while left:
            number, case, silent, code = _child(group, left, seed, page.name, tallies)
            if code == 0:
                return tallies
            name, first, count = left[number]
            tally = tallies[name]
            tally.hangs, tally.crashes = tally.hangs + silent, tally.crashes + (not silent)
            tally.failures.append({"case": case, "verdict": "hang" if silent else "crash", "seen": f"exit code {code}"})
            # cases of the batch that broke off are not counted, but for this one
            again = (name, case + 1, first + count - case - 1)
            go_on = again[2] > 0 and tally.crashes + tally.hangs < MOST_FAILURES
            left = [*([again] if go_on else []), *left[number + 1 :]]
    return tallies


def _child(
    group: str, jobs: list[tuple[str, int, int]], seed: int, shared: str, tallies: dict[str, Tally]
) -> tuple[int, int, bool, int]:
    """Run one child to its end: its job and case then, whether it was killed for silence, and its exit code."""
    with open(shared, "r+b") as opened, tempfile.TemporaryFile() as errors:
        page = mmap.mmap(opened.fileno(), AT.size)
        AT.pack_into(page, 0, 0, -1)
        child: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fuzzing.child", group, json.dumps(jobs), str(seed), shared],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(_cache()), "OMP_NUM_THREADS": "1"},
        )
        silent = False
        with ThreadPoolExecutor(1) as reader:
            counting = reader.submit(_count, child.stdout or (), tallies)
            seen, since = AT.unpack_from(page), time.monotonic()
            while child.poll() is None:
                time.sleep(0.02)
                if (now := AT.unpack_from(page)) != seen:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > (START_S if seen[1] < 0 else SILENT_S):
                    silent = True
                    child.kill()
                    child.wait()
            counting.result()
        number, case = AT.unpack_from(page)
        if child.returncode and case < 0:
            errors.seek(0)
            raise RuntimeError(
                f"the child for {group} could not make a valid input:\n{errors.read().decode(errors='replace')[-2000:]}"
            )
        return number, case, silent, child.returncode


def _count(lines: Iterable[bytes], tallies: dict[str, Tally]) -> None:
    for line in lines:
        result = json.loads(line)
        tally = tallies[result["target"]]
        tally.verdicts.update(result["verdicts"])
        tally.extra_mb = max(tally.extra_mb, round(result["extra"] / 2**20, 1))
        tally.failures.extend(result["failures"][: MOST_FAILURES - len(tally.failures)])


def _add(total: Tally, part: Tally) -> None:
    total.verdicts += part.verdicts
    total.crashes, total.hangs = total.crashes + part.crashes, total.hangs + part.hangs
    total.extra_mb = max(total.extra_mb, part.extra_mb)
    total.failures.extend(part.failures[: MOST_FAILURES - len(total.failures)])


def _cache() -> Path:
    """Kernels with bounds checks are other kernels; they are kept apart from those without."""
    return Path(os.environ.get("NUMBA_CACHE_DIR", ".numba_cache")).resolve() / "bounds-checked"
