"""Builds a release, and holds it against what it must be.

    python make/release.py build DIST            sdist and wheel of foreroute, and of foreroute-core: `core` alone
    python make/release.py check DIST            what make wheel-check does
    python make/release.py try DIST PYTHON...    what make release does, in new environments of each Python

1. Files: the sdist has what a packager needs and nothing that a build leaves behind; the wheel is of one platform and
   has every file of `src/foreroute`, the marker of types and the data files, and for the C++ what it was compiled to.
2. Light core: the wheel in a new environment, which gets no torch, no numba and no command line; with the extra "cli"
   commands and what they import work there.
3. Core: `foreroute_core` replays a model of torch alone; nothing else of ours and no other library is imported.
4. Extras: what an extra asks for is what its rooms need. They are imported from the wheel's files, in the environment
   that runs this script.

A try does the second in each Python. It installs both projects by name from the folder alone, compiles every file with
warnings as errors, resolves every extra, and plans from the sdists as from the wheels, bit for bit. Where pip finds a
torch for CPUs, the core replays alone and beside foreroute, and the first example of README.md runs.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
IN_SDIST = [
    "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", "pyproject.toml",
    "hatch_build.py", "mkdocs.yml", "conftest.py", "docs/index.md", "tests/conftest.py", "examples/trl/README.md",
    "benchmarks/README.md", "src/foreroute/kernels.hpp",
]  # fmt: skip
NOT_IN_SDIST = {".venv", ".venv-vllm", "runs", "site", "dist", "build", "__pycache__", ".mypy_cache"}
LIGHT_ROOMS = [
    "trace", "layout", "capture", "mismatch", "plan", "costs", "planner", "conformance", "doctor",
]  # fmt: skip
EXTRAS = {
    "cli": ["simulate", "report", "cli.main"],
    "hf": ["adapters.hf", "engines.embedded", "replay", "ep", "train", "conformance.huggingface", "doctor.examine"],
    "engines": ["engines.vllm", "engines.sglang"],
    "fit": ["costs.fitting", "simulate.fit"],
    "megatron": ["adapters.megatron"],
    "trl": ["trainers.trl"],
    "report": ["records", "report.run_plots", "report.diagnosis"],
}

A_TRACE = """
import foreroute as fr
from foreroute.testing.routes import synthetic_trace

spec = fr.RoutingSpec(64, 8, (fr.RoutedLayer(0), fr.RoutedLayer(1)))
fr.save(synthetic_trace(spec, [9, 12, 7, 12] * 32, seed=0), "t.safetensors")
"""
PLAN = ["plan", "t.safetensors", "--topology", "cluster.toml", "--no-baselines"]

CORE = """
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "foreroute-core"
version = "{version}"
description = "Replay of expert routes of Mixture-of-Experts models: integer tensors in, on torch alone"
readme = "README.md"
license = "Apache-2.0"
license-files = ["LICENSE"]
requires-python = "{requires-python}"
dependencies = ["{torch}"]

[tool.hatch.build.targets.wheel]
packages = ["foreroute_core"]
"""
TO_PUBLISH = """
To publish, a person must
  1. own the names foreroute and foreroute-core in the index; README.md ("Install") and errors.py ("in a clone") say
     that nobody does
  2. make the links of README.md absolute, date the version in CHANGELOG.md, commit, and tag it v{version}
  3. run make release on every other platform that gets a wheel; others compile the sdist
  4. pip install twine; twine check dist/*; twine upload dist/*
  5. try version {version} from the index in a new environment, and compare these sums:
"""


def main() -> None:
    """Do what is asked with a folder; end with a message at what is wrong."""
    verb, folder, pythons = sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3:]
    if verb == "build":
        return build(folder)
    files = Files.of(folder)
    check_sdist(files.sdist)
    check_wheel(files.wheel)
    with tempfile.TemporaryDirectory() as temporary:
        if verb == "try":
            tried = [try_on(python, files, Path(temporary) / str(i)) for i, python in enumerate(pythons)]
            require(any(tried), f"none of {pythons} is here, so nothing was tried; name a Python that is")
            print(TO_PUBLISH.format(**project()))
            for path in files:
                print(sha256(path.read_bytes()).hexdigest(), path.name)
            return None
        check_light_core(sys.executable, files.wheel, Path(temporary) / "light")
        check_core(files.core_wheel, Path(temporary) / "core")
        check_extras(files.wheel, Path(temporary) / "files")
    return None


class Files(NamedTuple):
    """What is built."""

    sdist: Path
    wheel: Path
    core_sdist: Path
    core_wheel: Path

    @classmethod
    def of(cls, folder: Path) -> Files:
        """Find the one release in a folder."""
        version = project()["version"]
        names = [f"{name}-{version}{end}" for name in ("foreroute", "foreroute_core") for end in (".tar.gz", "-*.whl")]
        found = [list(folder.glob(name)) for name in names]
        require(all(len(each) == 1 for each in found), f"{folder} does not hold one each of {names}")
        return cls(*(each[0] for each in found))


def build(folder: Path) -> None:
    """Build both projects; `core` is taken as it stands, under the name foreroute_core."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    run([*command, str(ROOT)], ROOT)
    about = project()
    torch = next(each for each in about["optional-dependencies"]["hf"] if each.startswith("torch"))
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary)
        core = shutil.copytree(
            ROOT / "src/foreroute/core", staged / "foreroute_core", ignore=shutil.ignore_patterns("__pycache__")
        )
        (core / "py.typed").touch()
        shutil.copy(ROOT / "LICENSE", staged)
        (staged / "pyproject.toml").write_text(CORE.format(**about, torch=torch), encoding="utf-8")
        said = ast.get_docstring(ast.parse((core / "__init__.py").read_text(encoding="utf-8")))
        readme = f"# foreroute-core\n\n{said}\n".replace("foreroute.core", "foreroute_core")
        (staged / "README.md").write_text(readme, encoding="utf-8")
        run([*command, str(staged)], staged)


def try_on(python: str, files: Files, folder: Path) -> bool:
    """Install the release in new environments of a Python, and use it from folders where the sources are not.

    Says whether the Python is here.
    """
    # a name may be there that runs nothing
    if shutil.which(python) is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
        print(f"{python}: not tried, as it is not here")
        return False
    print(f"== {run([python, '--version'], ROOT).strip()}")
    named = Environment(python, folder / "named")
    named("install", "--no-index", "--no-deps", "--find-links", str(files.wheel.parent), "foreroute", "foreroute-core")
    packages = [str(named.packages / name) for name in ("foreroute", "foreroute_core")]
    run([str(named.python), "-W", "error", "-m", "compileall", "-q", "-f", *packages], folder)
    print("names    foreroute and foreroute-core, from the folder alone; every file compiles without a warning")
    named("install", "--dry-run", "--ignore-installed", "--only-binary=:all:", f"{files.wheel}[all]")
    print("extras   every one resolves to wheels")
    check_light_core(python, files.wheel, folder / "light")
    sources = Environment(python, folder / "sources")
    sources("install", f"{files.sdist}[cli]")
    sources("install", "--no-deps", str(files.core_sdist))
    write_inputs(sources)
    run([str(sources.python.parent / "foreroute"), *PLAN], sources.folder)
    same = (sources.folder / "plan.safetensors").read_bytes() == (folder / "light" / "plan.safetensors").read_bytes()
    require(same, f"{files.sdist.name} plans otherwise than {files.wheel.name}")
    print("sources  both sdists install, and plan as the wheels do")
    constraint = "--constraint", str(ROOT / "constraints.txt")
    report = json.loads(sources("install", "--dry-run", "--report", "-", "--no-deps", *constraint, "torch"))
    torch = report["install"][0]["metadata"]["version"]
    if not torch.endswith("+cpu") and os.environ.get("RELEASE_TORCH") != "any":
        print(f"torch    not tried: {torch} is no build for CPUs. PIP_EXTRA_INDEX_URL can name an index of such, and")
        print("         RELEASE_TORCH=any takes this one")
        return True
    trainer = Environment(python, folder / "trainer")
    trainer("install", *constraint, str(files.core_wheel))
    replay = [str(trainer.python), "-I", "-c", A_MODEL]
    require(
        run(replay, trainer.folder).split() == ["foreroute_core", "torch"], "foreroute_core imports more than torch"
    )
    trainer("install", *constraint, f"{files.wheel}[hf]")
    run(replay, trainer.folder)
    run([str(trainer.python), "-I", "-c", first_example()], trainer.folder)
    print(f"torch    {torch}: foreroute_core alone and beside foreroute; the first example of README.md")
    return True


def first_example() -> str:
    """The first block of README.md, behind what conftest.py gives to it."""
    page, given = (ROOT / "README.md").read_text(encoding="utf-8"), (ROOT / "conftest.py").read_text(encoding="utf-8")
    [function] = [each for each in ast.parse(given).body if getattr(each, "name", "") == "a_users_things"]
    block = page.partition("```python\n")[2].partition("```")[0]
    return f"{ast.get_source_segment(given, function)}\na_users_things(globals())\n{block}"


def write_inputs(environment: Environment) -> None:
    """Write what is planned: a trace of routes, and the cluster that docs/planner.md writes out."""
    run([str(environment.python), "-c", A_TRACE], environment.folder)
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    _, *blocks = page.split("```toml\n")
    [cluster] = [block for block in blocks if block.startswith("[topology]\nnum_ranks = 8")]
    (environment.folder / "cluster.toml").write_text(cluster.partition("```")[0], encoding="utf-8")


class Environment:
    """A new environment, and pip for it: nothing is installed there."""

    def __init__(self, python: str, folder: Path) -> None:
        run([python, "-m", "venv", "--without-pip", str(folder)], ROOT)
        self.folder, self.python = folder, folder / "bin" / "python"
        [self.packages] = folder.glob("lib/python*/site-packages")

    def __call__(self, *arguments: str) -> str:
        """Run pip."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), *arguments[:1], "--quiet", "--no-compile"]
        return run([*pip, *arguments[1:]], self.folder)


def check_sdist(sdist: Path) -> None:
    """Everything that builds, tests and documents the package, and no product of doing so."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    require(not (lacking := sorted(set(IN_SDIST) - names)), f"{sdist.name} lacks {lacking}")
    stray = sorted(name for name in names if NOT_IN_SDIST & set(Path(name).parts) or name.endswith(".so"))
    require(not stray, f"{sdist.name} holds what a build or a run left behind: {stray[:5]}")
    print(f"sdist    {sdist.name}: {len(names)} files, {sdist.stat().st_size:,} bytes")


def check_wheel(wheel: Path) -> None:
    """Require every file of the package, typed, with its templates and configurations, and nothing beside it."""
    source = ROOT / "src"
    expected = {"foreroute/_kernels.so"} | {
        path.relative_to(source).as_posix()
        for path in (source / "foreroute").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".cpp", ".hpp")
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    require(packed == expected, f"{wheel.name} differs from src in {sorted(packed ^ expected)[:5]}")
    for suffix in ("py.typed", ".html.j2", ".toml"):
        require(any(name.endswith(suffix) for name in packed), f"{wheel.name} has no file that ends in {suffix}")
    require(any(name.endswith("/licenses/LICENSE") for name in names), f"{wheel.name} has no LICENSE")
    require("-py3-none-" in wheel.name and "-any" not in wheel.name, f"{wheel.name} is not of one platform, any Python")
    print(f"wheel    {wheel.name}: {len(names)} files, {wheel.stat().st_size:,} bytes")


def check_light_core(python: str, wheel: Path, folder: Path) -> None:
    """Install the wheel where nothing else is, and use it from a folder where the sources are not."""
    light = Environment(python, folder)
    light("install", str(wheel))
    python, command = str(light.python), str(folder / "bin" / "foreroute")
    imports = "; ".join(f"import foreroute.{room}" for room in LIGHT_ROOMS)
    unwanted = "torch", "numba", "matplotlib", "pydantic", "rich"
    absent = f"import importlib.util as u; assert not any(map(u.find_spec, {unwanted}))"
    run([python, "-c", f"{absent}; {imports}"], folder)
    write_inputs(light)
    lacking = run([command, "--version"], folder, code=2)
    require("pip install '.[cli]'" in lacking, f"foreroute does not say what it needs:\n{lacking}")
    light("install", f"{wheel}[cli]")
    wanted = project()["version"]
    said = run([command, "--version"], folder)
    require(said.split() == ["foreroute", wanted], f"foreroute --version says {said!r}, pyproject.toml {wanted}")
    run([python, "-c", "; ".join(f"import foreroute.{room}" for room in EXTRAS["cli"])], folder)
    for arguments in (["inspect", "t.safetensors"], ["validate", "t.safetensors"]):
        run([command, *arguments], folder)
    planned = run([command, *PLAN], folder)
    require((folder / "plan.safetensors").is_file(), "foreroute plan wrote no plan")
    require("pip install '.[report]'" in planned, f"foreroute plan does not say what a page needs:\n{planned}")
    lacking = run([command, "train", "any.toml"], folder, code=2)
    require("pip install '.[hf]'" in lacking, f"foreroute train does not say what it needs:\n{lacking}")
    print(f"light    {len(LIGHT_ROOMS)} rooms, and foreroute --version, inspect, validate, plan, without torch")


A_MODEL = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("foreroute", "transformers", "pydantic", "safetensors", "zstandard"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

if sys.argv[1:]:  # the folder of an environment that has more
    sys.meta_path.insert(0, Absent())
    sys.path.insert(0, sys.argv[1])

import torch
from torch import nn
from foreroute_core import attach, select_at

class TopKRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x):
        values, ids = torch.topk((x @ self.weight.T).softmax(-1), 2, dim=-1)
        return values / values.sum(-1, keepdim=True), ids

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = TopKRouter(), nn.Parameter(torch.randn(8, 16, 16) / 4)

    def forward(self, x):
        weights, ids = self.router(x.reshape(-1, 16))
        out = torch.einsum("nk,nkde,ne->nd", weights, self.experts[ids], x.reshape(-1, 16))
        return x + out.view(x.shape)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return (x,)

torch.manual_seed(0)
model = Model()
routed = attach(model)
ids = torch.randint(0, 32, (2, 5))
routes = torch.rand(2, 5, 2, 8).topk(2).indices
with routed.replay(routes), routed.record() as recording:
    model(ids)[0].sum().backward()
assert torch.equal(recording.ids()[0].long(), routes)
assert model.layers[0].router.weight.grad.abs().sum() > 0
picks = select_at(torch.randn(3, 8), torch.tensor([[3, 1], [-1, -1], [0, 7]]))[1]
assert picks[2].tolist() == [0, 7]
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"foreroute_core", "torch"}))
"""


def check_core(wheel: Path, folder: Path) -> None:
    """Replay a model with the core's wheel, where nothing else of ours can be imported."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    said = run([sys.executable, "-I", "-c", A_MODEL, str(folder)], folder)
    require(said.split() == ["foreroute_core", "torch"], f"the core alone said {said!r}")
    print(f"core     {wheel.name} replays a model of torch, and imports nothing else")


def check_extras(wheel: Path, folder: Path) -> None:
    """Import what each extra is for, from the wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    extras = project()["optional-dependencies"]
    require(set(extras) == {*EXTRAS, "all"}, f"extras are {sorted(extras)}, checked are {sorted(EXTRAS)} and all")
    for extra, rooms in EXTRAS.items():
        imports = "".join(f"import foreroute.{room}\n" for room in rooms)
        home = f"assert foreroute.__file__.startswith({str(folder)!r}), foreroute.__file__"
        run([sys.executable, "-c", imports + home], folder, PYTHONPATH=str(folder))
        print(f"extra    {extra}: {', '.join(rooms)}")


def project() -> dict[str, Any]:
    """The table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(command: list[str], folder: Path, *, code: int = 0, **environment: str) -> str:
    """Run a command in a folder without this environment's PYTHONPATH; its output, or an error with all it said.

    With another `code` than 0 it is that one it has to end with, and its errors are returned.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env={**kept, **environment}, capture_output=True, text=True, check=False)
    require(done.returncode == code, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stderr if code else done.stdout


def require(holds: bool, message: str) -> None:
    """End with a message where something does not hold."""
    if not holds:
        sys.exit(f"release: {message}")


if __name__ == "__main__":
    main()
