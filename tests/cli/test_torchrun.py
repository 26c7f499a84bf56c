"""`foreroute train` on several processes, as torchrun starts them."""

import os

import pytest
import tomli_w

from foreroute.testing.ranks import torchrun
from tests.train.small_runs import records, small_values

pytestmark = pytest.mark.slow


def foreroute(num_ranks, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return torchrun(num_ranks, "-m", "foreroute.cli", *arguments, timeout=240, env=environment)


@pytest.fixture
def config(tmp_path):
    sections = {"rollout": {"prompts": 4}, "rl": {"steps": 1}, "parallel": {"expert": 2, "timeout_s": 60.0}}
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(small_values(**sections)))
    return path


def test_two_processes_train_and_one_of_them_speaks(config, tmp_path):
    result = foreroute(2, "train", config, "--folder", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("checkpoint ") == result.stdout.count("report ") == 1
    (record,) = records(tmp_path / "run")
    assert record["execution"]["ranks"] == 2
    assert (tmp_path / "run" / "report.html").exists()


def test_the_demo_needs_several_processes(tmp_path):
    result = foreroute(1, "demo-ep", "--folder", tmp_path / "run")
    assert "1 process runs; start several: torchrun --nproc-per-node 4" in result.stderr
    assert not (tmp_path / "run").exists()


def test_the_wrong_number_of_processes_is_one_clear_error(config, tmp_path):
    result = foreroute(1, "train", config, "--folder", tmp_path / "run")
    assert result.returncode != 0
    assert (
        "parallel.expert is 2 and 1 process runs; start one for each rank: torchrun --nproc-per-node 2" in result.stderr
    )
    assert not (tmp_path / "run").exists()
