"""What vLLM's own workers are extended by: weights from a folder. Runs in the environment of vLLM.

Named on the command line of a server:  --worker-extension-cls foreroute.engines.vllm.worker_plugin.WorkerExtension
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Methods for `collective_rpc`. vLLM mixes them into its worker, whose `model_runner` they use."""

    model_runner: Any

    def foreroute_load(self, folder: str) -> str:
        """Replace the weights by those of a checkpoint in the Hugging Face layout.

        Returns:
            The folder, so that the caller sees that it ran.
        """
        for module in self.model_runner.get_model().modules():
            method: Any = getattr(module, "quant_method", None)
            # vLLM packs expert weights for the CPU kernel (UnquantizedFusedMoEMethod._setup_kernel) only when it makes
            # the kernel. With a kernel there, a reload leaves them unpacked, and every token is routed through garbage
            # without an error (seen in 0.30; like vllm-project/vllm issue 42821). Without one, it makes it again.
            if getattr(method, "moe_kernel", None) is not None and _on_cpu(module):
                method.moe_kernel = None
        self.model_runner.reload_weights(weights_path=folder)
        return folder


def _on_cpu(module: Any) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters())
