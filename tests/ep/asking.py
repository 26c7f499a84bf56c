"""How ranks ask each other on the host: how often, and on which groups."""

import contextlib
from unittest import mock

import torch.distributed as dist

QUESTIONS = ("all_gather", "all_reduce", "broadcast", "gather", "scatter", "barrier", "all_gather_object")
QUESTIONS += ("broadcast_object_list", "gather_object", "send_object_list", "recv_object_list", "monitored_barrier")


@contextlib.contextmanager
def asking():
    """The names of the collectives on gloo that are called in the context, in a list that grows.

    Rows are exchanged by others, and so are the parameters of FSDP2.
    """
    asked = []

    def noting(name, call):
        return lambda *args, **kwargs: asked.append(name) or call(*args, **kwargs)

    with mock.patch.multiple(dist, **{name: noting(name, getattr(dist, name)) for name in QUESTIONS}):
        yield asked
