from contextlib import ExitStack, closing
from functools import cache

import pytest
import transformers

from foreroute.adapters.versions import PEERS
from foreroute.testing.models import tiny
from foreroute.testing.ranks import Workers

try:
    from transformers.distributed.expert_parallel import EPImplementationInterface  # noqa: F401
except ImportError:
    assert transformers.__version__ != PEERS["transformers"].newest
    collect_ignore_glob = ["test_*.py"]  # of what is spread from 5.23 on


@pytest.fixture
def doomed():
    """`doomed(4)`: four processes of this test alone, in which some may die."""
    with ExitStack() as stack:
        yield lambda num_ranks: stack.enter_context(closing(Workers(num_ranks, timeout_s=120)))


@pytest.fixture(scope="package")
def folder_of(tmp_path_factory):
    """`folder_of("gpt_oss")`: the folder of a tiny model, written once."""

    @cache
    def of(family="qwen3_moe", **sizes):
        folder = tmp_path_factory.mktemp(family)
        tiny(family, seed=1, **sizes).save_pretrained(folder)
        return folder

    return of
