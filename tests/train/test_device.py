"""Where a run computes: the key, and the devices of processes."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from foreroute.errors import ConfigError
from foreroute.train.ranks import find_device, num_started


def seen(count, **environment):
    """As if torch saw so many CUDA devices, in a process with these variables."""
    stack = ExitStack()
    stack.enter_context(patch.object(torch.cuda, "is_available", lambda: count > 0))
    stack.enter_context(patch.object(torch.cuda, "device_count", lambda: count))
    stack.enter_context(patch.dict("os.environ", environment))
    return stack


def test_auto_takes_a_device_of_its_own_or_the_cpu():
    with seen(0):
        assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    with seen(2):
        assert find_device("auto") == find_device("cuda") == torch.device("cuda:0")
        assert find_device("cpu") == torch.device("cpu")
    with seen(2, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"):
        assert find_device("auto") == find_device("cuda") == torch.device("cuda:1")
    for rank in "0123":  # all processes of a machine decide alike
        with seen(2, LOCAL_RANK=rank, LOCAL_WORLD_SIZE="4"):
            assert find_device("auto") == torch.device("cpu")


def test_a_device_that_is_not_there_and_processes_that_are_no_number_are_refused():
    for count, variables, work in (
        (0, {}, lambda: find_device("cuda")),
        (1, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, lambda: find_device("cuda")),
        (1, {"LOCAL_RANK": "x"}, lambda: find_device("auto")),
        *((0, {"WORLD_SIZE": said}, num_started) for said in ("0", "-1", "two", "\u0662")),
    ):
        with seen(count, **variables), pytest.raises(ConfigError):
            work()
