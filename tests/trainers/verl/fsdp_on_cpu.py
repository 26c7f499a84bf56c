"""What verl's FSDP engine finds on GPUs alone, stood in for in every process of a run that imports this."""

from verl.workers.engine.fsdp import transformer_impl

from tests.trainers.verl.verl_standins import on_cpu

STANDINS = on_cpu()
STANDINS.__enter__()
# weights are where they are computed with
transformer_impl.load_fsdp_model_to_gpu = transformer_impl.offload_fsdp_model_to_cpu = lambda *_, **__: None
