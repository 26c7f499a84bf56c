"""verl where it is installed; elsewhere the tests that need it are skipped by name."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HAS_VERL = find_spec("verl") is not None
if HAS_VERL:
    from examples.verl import verl_on_cpu  # noqa: F401  before verl


@pytest.fixture(scope="session")
def group(tmp_path_factory):
    """A gloo group of one, as each worker of verl has one of all."""
    import torch.distributed as dist

    if dist.is_initialized():  # the kit's engines need one too
        yield
        return
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def verl_python():
    """The interpreter that has verl, for tests that run where TRL is."""
    if HAS_VERL:
        pytest.skip("runs where TRL is, which verl does not go with")
    named = os.environ.get("FOREROUTE_VERL_PYTHON")
    python = Path(named or ".venv-verl/bin/python").absolute()
    if not named and not python.exists():
        pytest.skip("there is no verl environment: run `make verl-env`, or set FOREROUTE_VERL_PYTHON")
    return python


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny checkpoint."""
    from examples.verl.tiny_checkpoint import save_policy

    return save_policy(tmp_path_factory.mktemp("policy"))
