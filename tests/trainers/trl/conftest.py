"""One thread, quiet libraries, and a tiny policy with its tokenizer from the examples."""

import logging
import os

import datasets
import pytest
import torch
import transformers

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
logging.getLogger("accelerate").setLevel(logging.ERROR)


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "run")
