"""Quiet libraries, and a folder for a run."""

import logging
import os

import datasets
import pytest

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
datasets.disable_progress_bars()
logging.getLogger("accelerate").setLevel(logging.ERROR)


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "run")
