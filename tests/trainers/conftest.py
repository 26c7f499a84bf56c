"""One thread, as small models need."""

import sys
from pathlib import Path

import torch

# pytest puts this folder on the path, where trl/ and verl/ would pass for installed ones
sys.path[:] = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]
torch.set_num_threads(1)
