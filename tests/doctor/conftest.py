"""One thread, as small models need, and quiet transformers."""

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
