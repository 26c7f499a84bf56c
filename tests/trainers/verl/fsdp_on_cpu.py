"""What verl's FSDP engine finds on GPUs alone, stood in for in every process of a run that imports this."""

from tests.trainers.verl.verl_standins import on_cpu

STANDINS = on_cpu()
STANDINS.__enter__()
