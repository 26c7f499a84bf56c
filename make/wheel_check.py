"""Holds a built sdist and wheel against what a release must be: `python make/wheel_check.py DIST`.

1. Files: the sdist has what a packager needs and nothing that a build leaves behind; the wheel is of one platform and
   has every file of `src/foreroute`, the marker of types and the data files, and for the C++ what it was compiled to.
2. Light core: the wheel in a new environment, which gets no torch, no numba and no command line; with the extra "cli"
   commands and what they import work there.
3. Core: `foreroute/core`, copied out of the wheel under another name, replays a model of torch alone; nothing else of
   ours and no other library is imported.
4. Extras: what an extra asks for is what its rooms need. They are imported from the wheel's files, in the environment
   that runs this script.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IN_SDIST = [
    "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", "pyproject.toml",
    "hatch_build.py", "mkdocs.yml", "conftest.py", "docs/index.md", "tests/conftest.py", "examples/trl/README.md",
    "benchmarks/README.md", "src/foreroute/kernels.hpp",
]  # fmt: skip
NOT_IN_SDIST = {".venv", ".venv-vllm", "runs", "site", "dist", "build", "__pycache__", ".mypy_cache"}
LIGHT_ROOMS = [
    "trace", "layout", "capture", "mismatch", "plan", "costs", "planner", "records", "conformance", "doctor",
]  # fmt: skip
EXTRAS = {
    "cli": ["simulate", "report", "cli.main"],
    "hf": ["adapters.hf", "engines.embedded", "replay", "ep", "train", "conformance.huggingface", "doctor.examine"],
    "engines": ["engines.vllm", "engines.sglang"],
    "fit": ["costs.fitting", "simulate.fit"],
    "megatron": ["adapters.megatron"],
    "trl": ["trainers.trl"],
    "report": ["report.run_plots", "report.plan_plots", "report.simulation_plots"],
}

A_TRACE = """
import foreroute as fr
from foreroute.testing.routes import synthetic_trace

spec = fr.RoutingSpec(8, 2, (fr.RoutedLayer(0), fr.RoutedLayer(1)))
fr.save(synthetic_trace(spec, [9, 12, 7, 12], seed=0), "t.safetensors")
"""
A_CLUSTER = """
topology = {num_ranks = 2, redundant_slots = 1}
hardware = {preset = "h100"}
model = {preset = "qwen3-30b-a3b", num_experts = 8, top_k = 2}
"""
PLAN = ["plan", "t.safetensors", "--topology", "cluster.toml", "--no-baselines"]


def main() -> None:
    """Check the one sdist and the one wheel in a folder; raise on what is wrong."""
    folder = Path(sys.argv[1]).resolve()
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    check_sdist(sdist)
    check_wheel(wheel)
    with tempfile.TemporaryDirectory() as temporary:
        check_light_core(wheel, Path(temporary) / "light")
        check_core(wheel, Path(temporary) / "core")
        check_extras(wheel, Path(temporary) / "files")


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


def check_light_core(wheel: Path, folder: Path) -> None:
    """Install the wheel where nothing else is, and use it from a folder where the sources are not."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile", str(wheel)]
    run(install, folder)
    command = str(folder / "bin" / "foreroute")
    imports = "; ".join(f"import foreroute.{room}" for room in LIGHT_ROOMS)
    unwanted = "torch", "numba", "matplotlib", "pydantic", "rich"
    absent = f"import importlib.util as u; assert not any(map(u.find_spec, {unwanted}))"
    run([str(python), "-c", f"{absent}; {imports}"], folder)
    run([str(python), "-c", A_TRACE], folder)
    lacking = run([command, "--version"], folder, code=2)
    require("pip install '.[cli]'" in lacking, f"foreroute does not say what it needs:\n{lacking}")
    run([*install[:-1], f"{wheel}[cli]"], folder)
    wanted = project()["version"]
    said = run([command, "--version"], folder)
    require(said.split() == ["foreroute", wanted], f"foreroute --version says {said!r}, pyproject.toml {wanted}")
    run([str(python), "-c", "; ".join(f"import foreroute.{room}" for room in EXTRAS["cli"])], folder)
    (folder / "cluster.toml").write_text(A_CLUSTER, encoding="utf-8")
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

sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[1])

import torch
from torch import nn
from foreroute_core import attach

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
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"foreroute_core", "torch"}))
"""


def check_core(wheel: Path, folder: Path) -> None:
    """Take the folder of the core as it stands, under another name, and replay a model with it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (folder / "foreroute" / "core").rename(folder / "foreroute_core")
    (folder / "replay.py").write_text(A_MODEL, encoding="utf-8")
    said = run([sys.executable, "-I", "replay.py", str(folder)], folder)
    require(said.split() == ["foreroute_core", "torch"], f"the core alone said {said!r}")
    print("core     foreroute_core replays a model of torch, and imports nothing else")


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


def project() -> dict[str, object]:
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
        sys.exit(f"wheel-check: {message}")


if __name__ == "__main__":
    main()
