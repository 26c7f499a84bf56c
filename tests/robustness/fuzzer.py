"""Gives readers malformed inputs in a child process, where indices of compiled loops are checked and memory is limited.

A crash or a hang ends the child and the attack. Before each case the child writes down its number and sets its alarm:
the kernel ends a child that is silent for too long, whatever it is in.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np

import hatch_build
from foreroute.testing.ranks import environment
from tests.robustness.target import FAILURES, load_group

SEED = 1
BATCH = 50
"""Cases that share one valid input."""
START_S = 300
"""To make and read a valid input, for which frameworks are imported."""
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
HANGS_AFTER_S = 20
"""A case that takes longer hangs. Valid inputs take milliseconds; the rest is for a busy machine."""
ADDRESS_SPACE = 64 << 20
"""What a malformed input may map beyond what is mapped when the valid one has been read, pages touched or not."""


@dataclass
class Tally:
    """What became of the inputs of one target."""

    verdicts: Counter = field(default_factory=Counter)
    failures: list = field(default_factory=list)


def attack(group, inputs, *, names=None, hangs_after_s=HANGS_AFTER_S):
    """The tally of each target of a group, or of those with these names, of `inputs` for each unit of its weight."""
    with tempfile.NamedTemporaryFile() as progress:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.robustness.fuzzer", json.dumps([group, inputs, names, hangs_after_s])],
            capture_output=True,
            env=environment(FOREROUTE_KERNELS=str(_checked_kernels()), OMP_NUM_THREADS="1", PROGRESS=progress.name),
            check=False,
        )
        case = progress.read().decode()
    tallies = {}
    for line in ended.stdout.splitlines():
        result = json.loads(line)
        tally = tallies.setdefault(result["target"], Tally())
        tally.verdicts.update(result["verdicts"])
        tally.failures.extend(result["failures"])
    if ended.returncode:
        said = ended.stderr.decode(errors="replace")[-2000:]
        if not tallies or not case:
            raise RuntimeError(f"the child for {group} could not make a valid input:\n{said}")
        verdict = "hang" if ended.returncode == -signal.SIGALRM else "crash"
        tally.verdicts[verdict] += 1
        tally.failures.append([int(case), verdict, f"exit code {ended.returncode} {said}"])
    return tallies


def summary(tallies):
    verdicts = sum((tally.verdicts for tally in tallies.values()), Counter())
    counted = ", ".join(f"{verdicts[name]} {name}" for name in (*FAILURES, "refused", "same", "plausible"))
    return f"{verdicts.total()} malformed inputs over {len(tallies)} readers: {counted}"


def main():
    """`python -m tests.robustness.fuzzer ORDER`, as `attack` gives it."""
    group, inputs, names, hangs_after_s = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(os.environ["PROGRESS"], "r+b", buffering=0) as page, tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:

        def begin(case):
            page.truncate(0)
            os.pwrite(page.fileno(), b"%d" % case if case >= 0 else b"", 0)
            signal.alarm(START_S if case < 0 else hangs_after_s)

        for target in load_group(group, Path(folder)):
            if names is not None and target.name not in names:
                continue
            print(json.dumps({"target": target.name, "verdicts": {}, "failures": []}), flush=True)
            for start in range(0, inputs * target.weight, BATCH):
                begin(-1)
                result = _attack_batch(target, range(start, start + BATCH), begin)
                print(json.dumps({"target": target.name, **result}), flush=True)
        signal.alarm(0)


def _attack_batch(target, cases, begin):
    """The verdicts of cases that share a valid input. `begin` is called with the number of each."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    valid = target.make(np.random.default_rng([SEED, cases[0]]))
    expected = target.content(valid)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, resource.RLIM_INFINITY))
    verdicts, failures = Counter(), []
    for case in cases:
        begin(case)
        raw, forged = target.malformed(valid, case, np.random.default_rng([SEED, case, 1]))
        verdict, seen = target.judge(raw, expected, forged=forged)
        verdicts[verdict] += 1
        if seen:
            failures.append([case, verdict, seen])
    return {"verdicts": verdicts, "failures": failures}


@cache
def _checked_kernels():
    """The library whose loops end the process at an index outside of an array, compiled anew after a change of any."""
    sources = sorted([*hatch_build.SOURCE.rglob("*.?pp"), Path(hatch_build.__file__)])
    digest = sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    made = hatch_build.SOURCE.parents[1] / ".pytest_cache" / f"checked-kernels-{digest}.so"
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        hatch_build.compile_kernels(made, "-DCHECK_BOUNDS")
    return made


if __name__ == "__main__":
    main()
