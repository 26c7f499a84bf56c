"""The pipeline of examples/pipeline, with engines that need no vLLM: what it exports, computes and refuses."""

import contextlib
import io
import logging
import os
import signal
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from examples.pipeline import train
from foreroute.adapters.checkpoint import FolderWriter, quiet_transformers
from foreroute.engines.embedded import EmbeddedEngine
from tests.adapters.megatron.test_home_checkpoints import children_allowed

LOST = "model.layers.2.mlp.experts.5.down_proj.weight"


class TransformersEngine:
    """An engine that reads checkpoints as transformers does, and knows nothing of Megatron."""

    def __init__(self, checkpoint):
        self.writer = FolderWriter(checkpoint)
        self.engine = EmbeddedEngine(read(checkpoint), "float32")

    weight_version = property(lambda self: self.engine.weight_version)

    def load_weights(self, named, version):
        with tempfile.TemporaryDirectory() as folder:
            model = read(self.writer.write(Path(folder), named))
        self.engine.load_weights(model.state_dict(), version)

    def generate(self, *asked):
        return self.engine.generate(*asked)

    def close(self):
        pass


class LosingEngine(TransformersEngine):
    """Keeps the first value of one weight, as an engine does that skips a name."""

    def __init__(self, checkpoint):
        super().__init__(checkpoint)
        self.first = load_file(checkpoint / "model.safetensors")[LOST]

    def load_weights(self, named, version):
        super().load_weights(((n, self.first if n == LOST else weight) for n, weight in named), version)


def read(folder):
    with quiet_transformers():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )


def trains(folder, rollouts, split, steps, engine="TransformersEngine"):
    """In float64, on rollouts of an engine, or of another run. What each rank printed as an error."""
    source = rollouts and Path(rollouts)
    start = source or globals()[engine]
    logging.getLogger("megatron").setLevel(logging.ERROR)  # its newest release warns that GPTModel is deprecated
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            with children_allowed():
                train.train(Path(folder), start, train.Split(*split), steps, torch.float64)
        except SystemExit as ended:
            return ended.code, printed.getvalue()
    return 0, printed.getvalue()


def dies(folder, rollouts, split, steps, dying):
    """One rank is killed behind its forwards and backwards of the second step, before gradients are summed."""
    average = train.average_gradients
    steps_made = iter(range(train.UPDATES))

    def killed(model):
        if dist.get_rank() == dying and next(steps_made, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        average(model)

    with mock.patch.object(train, "average_gradients", killed):
        return trains(folder, rollouts, split, steps)
