"""Runs in vLLM's Python, as `python -m MODULE ...`: its server, with the stand-ins of `masks_worker`.

The engine has a process of its own, which imports this file too before it does anything else.
"""

import runpy
import sys

from masks_worker import stand_in_for_kernels, stand_in_for_the_interpreter

stand_in_for_the_interpreter()

import vllm  # noqa: E402, F401

stand_in_for_kernels()

if __name__ == "__main__":
    _, flag, module, *_ = sys.argv
    assert flag == "-m", sys.argv
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__")
