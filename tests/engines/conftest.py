"""One thread, as small models need."""

import sys
from pathlib import Path

import torch

# pytest puts this folder on the path, where vllm/ would pass for an installed vLLM, as TRL looks for one
sys.path[:] = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]
torch.set_num_threads(1)
