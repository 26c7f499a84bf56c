"""The harness: what goes wrong on a rank comes back as one message, and which Megatron runs."""

import os
from importlib import metadata

from tests.adapters.megatron.forked_ranks import run


def version():
    import megatron.core

    return megatron.core.__version__


def test_the_megatron_that_runs_is_the_one_asked_for():
    """`make test-megatron-newest` puts another before the one that is installed, and says which."""
    [found] = run("test_forked_ranks.version")
    # Megatron adds the commit of a repository that it lies in
    assert found.split("+")[0] == os.environ.get("FOREROUTE_MEGATRON", metadata.version("megatron-core"))
