"""verl where it is installed; elsewhere the tests that need it are skipped by name."""

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("verl") is not None:
    from examples.verl import verl_on_cpu  # noqa: F401  before verl


@pytest.fixture(scope="session")
def group(tmp_path_factory):
    """A gloo group of one, as each worker of verl has one of all."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    from examples.verl.tiny_checkpoint import save_policy

    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """A folder with verl's package as it was released, and the patch for it applied."""
    folder, released = tmp_path_factory.mktemp("patched"), Path(find_spec("verl").origin).parent
    shutil.copytree(released, folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    patch = Path(__file__).parents[3] / "examples" / "verl" / "upstream" / "fsdp_router_replay.patch"
    subprocess.run(["patch", "-p1", "--fuzz=0", "-i", patch], cwd=folder, check=True)
    return folder
