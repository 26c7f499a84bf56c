"""One thread, as small models need."""

import torch

torch.set_num_threads(1)
