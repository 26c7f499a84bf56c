"""Weights for engines: a folder and a spec are enough, and whatever else is in a folder is left as it is."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foreroute import load
from foreroute.adapters import checkpoint as checkpoints
from foreroute.adapters.checkpoint import FolderWriter, ModelWriter, ServedModel
from foreroute.engines import vllm
from foreroute.engines.base import SUBFOLDER, WeightsFolder
from foreroute.errors import ConfigError
from foreroute.testing.ranks import environment
from tests.engines.small_policy import SAMPLING, seeded
from tests.engines.vllm.conftest import assert_ends

WITHOUT_TRANSFORMERS = """
import os, sys
from pathlib import Path
sys.modules["transformers"] = None  # importing it fails

import numpy as np, torch
from safetensors.torch import load_file
import foreroute as fr
from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import Sampling
from foreroute.engines import sglang, vllm

python, checkpoint, out = map(Path, sys.argv[1:])
settings = vllm.ServerSettings(python=python, options={"behaviour": "good"})
spec = fr.RoutingSpec(16, 4, tuple(fr.RoutedLayer(layer) for layer in range(3)))
engine = vllm.VLLMEngine(ServedModel.at(checkpoint, spec=spec), settings)
engine.load_weights(iter(load_file(checkpoint / "model.safetensors").items()), version=4)
sampling = Sampling(max_new_tokens=30, end_token=3, temperature=0.8, group_size=2)
prompts = [np.arange(5, dtype=np.int32), np.arange(9, dtype=np.int32)]
generation = engine.generate(prompts, sampling, torch.Generator().manual_seed(1))
fr.save(generation.trace, out)
assert not any(name.startswith("foreroute.adapters.hf") for name in sys.modules)
print(engine._process._process.pid, engine._process.folder, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def folder(routed, tmp_path):
    return ModelWriter(routed.model).write(tmp_path / "checkpoint")


def tensors(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.slow
def test_an_engine_samples_without_a_model_of_transformers_and_its_server_ends_with_a_killed_trainer(
    routed, folder, fake_settings, tmp_path
):
    """The server sees its standard input close."""
    arguments = [fake_settings().python, folder, tmp_path / "trace.safetensors"]
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS, *map(str, arguments)]
    child = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert child.returncode == -9, child.stderr
    server, made = child.stdout.split()
    assert_ends(int(server))
    assert not Path(made).exists()
    with vllm.VLLMEngine(ServedModel.of(routed), fake_settings()) as engine:
        engine.load_weights(routed.model.state_dict(), version=4)
        asked = [np.arange(5, dtype=np.int32), np.arange(9, dtype=np.int32)]
        wanted = engine.generate(asked, replace(SAMPLING, group_size=2), seeded())
    assert load(arguments[-1]).equals(wanted.trace.without_pick_order())


def test_many_weights_are_split_into_shards_that_transformers_reads(routed, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SHARD_BYTES", 1 << 16)
    weights = tensors(folder)
    written = FolderWriter(folder).write(tmp_path / "new", iter(weights.items()))
    index = json.loads((written / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert index["weight_map"].keys() == weights.keys()
    assert len(set(index["weight_map"].values())) == len(list(written.glob("*.safetensors"))) > 2
    assert max(path.stat().st_size for path in written.glob("*.safetensors")) < 1 << 17
    loaded = type(routed.model).from_pretrained(written)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in routed.model.state_dict().items())


def test_weights_that_an_engine_would_keep_or_take_twice_are_refused(routed, folder, tmp_path):
    weights = tensors(folder)
    first = min(weights)
    # under the names that transformers 5 has in memory, experts of a layer are one tensor
    with pytest.raises(ConfigError, match=r"engine.*values"):
        FolderWriter(folder).write(tmp_path / "fused", routed.model.state_dict())
    with pytest.raises(ConfigError, match=rf"'{first}'.*twice"):
        FolderWriter(folder).write(tmp_path / "twice", [(first, weights[first])] * 2)
    with pytest.raises(ConfigError, match="weights"):
        FolderWriter(folder).write(tmp_path / "none", iter(()))


def test_the_first_weights_are_those_of_the_source_and_are_not_copied(folder, tmp_path):
    written = FolderWriter(folder).write(tmp_path / "first")
    assert (written / "model.safetensors").is_symlink()
    assert tensors(written).keys() == tensors(folder).keys()
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"weights.*safetensors"):
        FolderWriter(folder).write(tmp_path / "second")
    save_file({}, folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match=r"read.*weights"):
        FolderWriter(folder)


class Model:
    """Saves a file, and as much of a second one as there is room for."""

    room = True

    def save_pretrained(self, folder, state_dict):
        (folder / "config.json").write_text("{}")
        torch.save(state_dict, folder / "model.bin")
        if not self.room:
            raise OSError(28, "No space left on device")


def contents(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_one_trainer_at_a_time_and_what_else_is_there_is_left_as_it_is(tmp_path):
    (tmp_path / ".hidden").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"nothing.*written"):
        ModelWriter(Model()).write(tmp_path)
    for _ in range(2):
        folder = WeightsFolder(tmp_path, ModelWriter(Model()))
        folder.put({})
        with pytest.raises(ConfigError, match="another trainer"):
            WeightsFolder(tmp_path, ModelWriter(Model()))
        folder.close()
        folder.close()
    assert [path for path in contents(tmp_path) if not path.startswith(SUBFOLDER)] == before


def test_a_full_disk_is_one_error_and_leaves_no_half_checkpoint(tmp_path):
    model = Model()
    folder = WeightsFolder(tmp_path, ModelWriter(model))
    model.room = False
    with pytest.raises(ConfigError, match=r"written.*space"):
        folder.put({})
    assert contents(tmp_path) == [SUBFOLDER]
