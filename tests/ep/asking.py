"""How ranks ask each other on the host: how often, and on which groups."""

import contextlib
from unittest import mock

import torch
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


@contextlib.contextmanager
def no_host_tensors(*groups):
    """Collectives of these groups refuse tensors of the host, as those on NCCL do."""

    def refusing(original):
        def call(*args, group=None, **options):
            tensors = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
            if group in groups and any(
                isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in tensors
            ):
                raise RuntimeError("No backend type associated with device type cpu")
            return original(*args, group=group, **options)

        return call

    with mock.patch.multiple(dist, **{name: refusing(getattr(dist, name)) for name in ("all_reduce", "all_gather")}):
        yield
