"""One thread, as small models need."""

import sys
from pathlib import Path

import torch

# pytest puts this folder on the path, where megatron/ would pass for an installed Megatron
sys.path[:] = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]
torch.set_num_threads(1)
