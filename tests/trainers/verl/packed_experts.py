"""The fault that verl and vLLM had together on a CPU: a sync wrote experts' weights where packed ones are read."""

import vllm_on_cpu


class WorkerExtension(vllm_on_cpu.WorkerExtension):
    """One that leaves the experts' kernels as they are."""

    def unpack_experts(self):
        pass
