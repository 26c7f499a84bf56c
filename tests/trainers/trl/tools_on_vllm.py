"""Runs in vLLM's Python, with TRL beside it: one step of TRL with a tool, sampled by its own vLLM ("colocate").

    python -m tests.trainers.trl.tools_on_vllm FOLDER REPLAY DTYPE

Two things of TRL do not work on a CPU. vLLM compiles there unless it is told not to, and its routes are then all zero.
And weights that are pushed into its model, as TRL does, are not packed for the CPU's kernels: they go through a folder.
"""

import json
import os
import sys

os.environ.update(
    TRL_EXPERIMENTAL_SILENCE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="WARNING",
)


def main(folder: str, replay: str, dtype: str) -> None:
    import torch
    from trl.generation import vllm_generation

    from examples.trl.tiny import agent, chat_tokenizer
    from foreroute.engines.inside_vllm import WorkerExtension
    from tests.trainers.trl.tools_runs import make, sequences_of
    from tests.trainers.trl.trl_runs import logged

    torch.set_num_threads(1)
    start = vllm_generation.LLM
    vllm_generation.LLM = lambda **options: start(**{**options, "enforce_eager": True, "dtype": dtype})

    def sync_weights(self):
        self.model.save_pretrained(f"{self.model.name_or_path}/pushed")
        WorkerExtension.foreroute_load(
            self.llm.llm_engine.model_executor.driver_worker, f"{self.model.name_or_path}/pushed"
        )
        self.llm.reset_prefix_cache()

    vllm_generation.VLLMGeneration.sync_weights = sync_weights
    agent().save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    model = type(agent()).from_pretrained(folder, dtype=torch.float32)
    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256}
    settings["max_completion_length"] = 100
    trainer = make(f"{folder}/run", model=model, replay=replay, **settings)
    trainer.train()
    turns = [int((sampled[1:] & ~sampled[:-1]).sum()) for _, sampled, _ in sequences_of(trainer)]
    found = {name: logged(trainer, f"mismatch/{name}") for name in ("k3", "disagreement")}
    sys.stdout.write(f"\n{json.dumps({**found, 'turns': turns})}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
