"""Runs in vLLM's Python: samples with `return_sampling_mask`, and writes what each request gave and its digest.

vLLM 0.30 makes masks in its Model Runner V2 alone, whose kernels are Triton's. Without a GPU they run in Triton's
interpreter, where three fail. Those three have stand-ins here: the top-k/top-p filter (vLLM's own one in torch), the
drawing of a token, and the compaction of masks. All else is vLLM's: configuration, the order of filters, log-probs,
transport and output objects.
"""

import importlib.metadata
import json
import os
import sys

os.environ.update(
    TRITON_INTERPRET="1",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
)
VOCABULARY = 2048


def main(checkpoint: str, dtype: str, output: str) -> None:
    stand_in_for_the_interpreter()
    from vllm import LLM, SamplingParams

    stand_in_for_kernels()
    from foreroute import RoutedLayer, RoutingSpec
    from foreroute.capture import ModelFacts, decode
    from foreroute.trace import digest

    facts = ModelFacts(RoutingSpec(16, 4, tuple(map(RoutedLayer, range(3)))), 3, VOCABULARY)
    engine = LLM(
        model=checkpoint,
        dtype=dtype,
        max_model_len=64,
        max_num_seqs=16,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_return_routed_experts=True,
        return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
    )
    prompts = [{"prompt_token_ids": [5 + (7 * s * p) % (VOCABULARY - 5) for p in range(8 + s)]} for s in range(16)]
    written = {}
    for top_p in (0.8, 1.0):
        params = SamplingParams(max_tokens=16, logprobs=0, seed=1, detokenize=False, top_p=top_p, top_k=VOCABULARY)
        outputs = engine.generate(prompts, params, use_tqdm=False)
        rows = [
            {
                "prompt": list(request.prompt_token_ids),
                "tokens": list(request.outputs[0].token_ids),
                "logprobs": [
                    of[token].logprob
                    for of, token in zip(request.outputs[0].logprobs, request.outputs[0].token_ids, strict=True)
                ],
                "routes": request.outputs[0].routed_experts.tolist(),
                "masks": request.outputs[0].sampling_mask.token_ids,
            }
            for request in outputs
        ]
        written[str(top_p)] = {"rows": rows, "digest": digest(decode(outputs, model=facts, engine="vllm"))}
    with open(output, "w", encoding="utf-8") as file:
        json.dump(written, file)


def stand_in_for_the_interpreter() -> None:
    """Triton lists a backend for the CPU, and the CPU build answers for the version of vLLM."""
    import triton.backends as backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class Backend:
        driver, compiler = Driver, None

    backends.backends.setdefault("cpu", Backend)
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)


def stand_in_for_kernels() -> None:
    import numpy as np
    import torch
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.sample import sampler

    topk_topp_sampler.HAS_TRITON = False  # then it filters in torch
    made = sampler.SamplingMaskTensors

    def draw(logits, *rest, **options):
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log()
        return (logits.float() - noise).argmax(-1)

    def compact(logits, num_sampled, most_kept):
        width = min(most_kept, logits.shape[1], VOCABULARY)
        kept = torch.isfinite(logits) & (num_sampled > 0)[:, None]
        ids = torch.zeros(len(logits), width, dtype=torch.int32)
        for row, keep in enumerate(kept):
            own = keep.nonzero().flatten()[:width]
            ids[row, : len(own)] = own.int()
        bits = torch.from_numpy(np.packbits(kept.numpy(), axis=1, bitorder="little"))
        return made(ids, bits, kept.sum(1).int(), logits.shape[1])

    sampler.gumbel_sample = draw
    made.from_logits = staticmethod(compact)


if __name__ == "__main__":
    main(*sys.argv[1:])
