"""Routed layers of a checkpoint, without its weights: a model of transformers that takes no memory is asked.

transformers builds the model from `config.json` on tensors that have a shape and no values, and the forward that
`attach` runs is run on these. So the layers are those that the classes themselves make, in every family, and a family
that transformers gets tomorrow needs nothing here. No code of the folder is executed, and no weight is read.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from foreroute.adapters.checkpoint import quiet_transformers
from foreroute.adapters.hf.attaching import find_indexers, spec_of
from foreroute.adapters.hf.loading import first_line, read_config
from foreroute.core.find import find_by, find_routers
from foreroute.core.probe import Probe
from foreroute.errors import AttachError, ConfigError
from foreroute.trace import IndexerSpec, RoutingSpec


class NothingSelected(TorchDispatchMode):
    """Mode in which a mask is true nowhere, and a number that is read is 0, since no tensor has values."""

    # Experts that loop over the rows they were sent, and attention that gathers what an indexer chose, run on no rows.
    # Routers are not concerned: the shape of a top-k does not depend on values.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].ndim), dtype=torch.int64)
        if func is torch.ops.aten.index.Tensor:  # a mask stands for an index on each of its axes
            none = torch.zeros(0, dtype=torch.int64)
            masks = [i is not None and i.dtype == torch.bool for i in args[1]]
            args = (
                args[0],
                [e for i, mask in zip(args[1], masks, strict=True) for e in ([none] * i.ndim if mask else [i])],
            )
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        return func(*args, **kwargs or {})


def structure_of(path: Path) -> tuple[RoutingSpec, IndexerSpec | None, Mapping[str, Any]]:
    """Look at the decoder that a config.json describes; of a model with images or sound, its text decoder.

    Its routed layers, its indexers, None where they are not known, and its configuration with defaults.
    """
    config = read_config(path).get_text_config()
    try:
        with quiet_transformers(), torch.random.fork_rng(range(torch.cuda.device_count())), torch.no_grad():
            with torch.device("meta"):  # where constructors can cast a part, as no fake can be
                model = _decoder_of(config).eval()
            with suppress(ValueError):  # a family without a choice refuses to be given one
                model.set_experts_implementation("eager")
            with _fakes(), NothingSelected():
                model.to_empty(device="cpu")  # autocast, which forwards turn off, knows no device `meta`
                trunk, _, routers = find_by(Probe.of(model), find_routers(model))
            spec = spec_of(model, routers)
            indexers = find_indexers(model, trunk)
    except Exception as error:  # transformers raises what its classes raise
        reason = first_line(error.__cause__ or error) if isinstance(error, AttachError) else first_line(error)
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} does not tell which layers route ({reason:.400}); pass a "
            "trace of the model, or the spec of its routed layers, instead"
        ) from error
    return spec, None if indexers is None else indexers.spec, config.to_dict()


def _decoder_of(config: Any) -> Any:
    """Make the decoder alone."""
    # transformers maps the configurations of most decoders, and not of all that see or hear: for those, the module of
    # the models of a family has the name of that of its configurations, but for one word
    if type(config) in transformers.MODEL_MAPPING:
        return transformers.AutoModel.from_config(config, trust_remote_code=False)
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for each in vars(module).values():
        is_model = isinstance(each, type) and issubclass(each, transformers.PreTrainedModel) and "forward" in vars(each)
        if is_model and each.config_class is type(config):
            return each(config)
    raise AttachError(f"no class of {module.__name__} is made of a {type(config).__name__}")


@contextmanager
def _fakes() -> Iterator[None]:
    """Make tensors without values or memory while the context is open."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it writes what is raised as well
    was_disabled, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = was_disabled
