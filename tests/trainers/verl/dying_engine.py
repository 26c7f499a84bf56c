"""A vLLM engine that dies inside a weight sync."""

import os
import signal

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

import vllm_on_cpu


class WorkerExtension(vllm_on_cpu.WorkerExtension):
    """Of the first server: it takes all buckets of its third sync but the last."""

    def update_weights_from_ipc(self, use_shm=False, **kwargs):
        if (self.num_syncs, os.environ["VERL_REPLICA_RANK"]) == (2, "0"):
            BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm).receive_weights(die_at_the_last)
        super().update_weights_from_ipc(use_shm=use_shm, **kwargs)


def die_at_the_last(weights, is_last):
    if is_last:
        os.kill(os.getppid(), signal.SIGKILL)  # the engine, with which its workers go
        signal.pause()
