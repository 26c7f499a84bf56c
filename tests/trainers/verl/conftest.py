"""verl where it is installed; elsewhere the tests that need it are skipped by name."""

from importlib.util import find_spec

import pytest

if find_spec("verl") is not None:
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
def folder(tmp_path_factory):
    from examples.verl.tiny_checkpoint import save_policy

    return save_policy(tmp_path_factory.mktemp("policy"))
