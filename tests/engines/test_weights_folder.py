"""The folder that weights go through: nothing of anybody else's is touched, and no checkpoint is seen half written."""

import subprocess
import sys

import pytest
import torch

from foreroute.adapters.checkpoint import ModelWriter
from foreroute.engines.base import SUBFOLDER, WeightsFolder
from foreroute.errors import ConfigError
from foreroute.testing.ranks import environment


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


@pytest.mark.parametrize("name", ["notes.txt", "weights/thesis.txt", ".hidden"])
def test_what_else_is_there_is_left_as_it_is(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"nothing.*written"):
        ModelWriter(Model()).write(tmp_path)
    for _ in range(2):
        folder = WeightsFolder(tmp_path, ModelWriter(Model()))
        folder.put({})
        folder.close()
    assert [path for path in contents(tmp_path) if not path.startswith(SUBFOLDER)] == before


def test_one_trainer_at_a_time(tmp_path):
    first = WeightsFolder(tmp_path, ModelWriter(Model()))
    with pytest.raises(ConfigError, match="another trainer"):
        WeightsFolder(tmp_path, ModelWriter(Model()))
    first.close()
    first.close()
    WeightsFolder(tmp_path, ModelWriter(Model())).put({})


@pytest.mark.slow
def test_what_a_killed_trainer_left_half_written_is_removed(tmp_path):
    script = (
        "import os, sys, pathlib\n"
        "from foreroute.adapters.checkpoint import ModelWriter\n"
        "from foreroute.engines.base import WeightsFolder\n"
        "class Model:\n"
        "    def save_pretrained(self, folder, state_dict):\n"
        "        (folder / 'config.json').write_text('half')\n"
        "        os.kill(os.getpid(), 9)\n"
        "WeightsFolder(pathlib.Path(sys.argv[1]), ModelWriter(Model())).put({})"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment(), timeout=120)
    (half,) = (tmp_path / SUBFOLDER).iterdir()
    assert contents(half) == ["config.json"]
    whole = WeightsFolder(tmp_path, ModelWriter(Model())).put({})
    assert list((tmp_path / SUBFOLDER).iterdir()) == [whole]


def test_a_full_disk_is_one_error_and_leaves_no_half_checkpoint(tmp_path):
    model = Model()
    folder = WeightsFolder(tmp_path, ModelWriter(model))
    model.room = False
    with pytest.raises(ConfigError, match=r"written.*space"):
        folder.put({})
    assert contents(tmp_path) == [SUBFOLDER]
