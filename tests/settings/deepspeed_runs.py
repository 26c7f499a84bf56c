"""DeepSpeed in a worker process of a test."""

import os
from importlib import import_module


def import_deepspeed(rank):
    """Import it as torchrun's processes do, over the group that the worker has."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    os.environ |= {name: str(value) for name, value in environment.items()} | {"DS_ACCELERATOR": "cpu"}
    import deepspeed

    # gloo takes its place; building it takes a compiler, and most of a minute. `deepspeed.comm.torch` is torch itself
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    return deepspeed


def config(stage):
    """A step as torch has it: every parameter is taken apart at stage 3, and no gradient is clipped."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
