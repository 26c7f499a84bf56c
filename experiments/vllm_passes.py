"""Passes of vLLM over given tokens: `python vllm_passes.py FOLDER`, with the Python of vLLM's environment.

The folder has a checkpoint `model`, the sequences in `tokens.npz` (tokens_N, lengths_S) and `passes.json`: options of
the engine, and by name what the passes are. Each pass leaves `NAME.npz`: logprobs_N of all tokens but the first of each
sequence, whose places hold 0, and ids_NLK of all tokens, [N, layers, K].
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams


def main() -> None:
    """Run the passes of a folder."""
    folder = Path(sys.argv[1])
    asked = json.loads((folder / "passes.json").read_text(encoding="utf-8"))
    given = np.load(folder / "tokens.npz")
    sequences = np.split(given["tokens_N"], np.cumsum(given["lengths_S"])[:-1])
    engine = LLM(model=str(folder / "model"), **asked["options"])
    for name, how in asked["passes"].items():
        np.savez(folder / f"{name}.npz", **score(engine, sequences, **how))


def score(engine: Any, sequences: list[Any], *, batch: int, cached: bool = False) -> dict[str, Any]:
    """One pass: `batch` sequences at a time, on the prefixes that earlier passes left in the cache if `cached`."""
    sampling = SamplingParams(
        max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True, skip_reading_prefix_cache=not cached
    )
    prompts = [{"prompt_token_ids": tokens.tolist()} for tokens in sequences]
    outputs = []
    for first in range(0, len(prompts), batch):
        outputs += engine.generate(prompts[first : first + batch], sampling, use_tqdm=False)
    logprobs = [_logprob(at, int(t)) for out, s in zip(outputs, sequences, strict=True) for at, t in _places(out, s)]
    if cached and not np.isnan(logprobs).any():
        raise RuntimeError("nothing was in the prefix cache: this pass would say nothing of it")
    routes = [np.asarray(out.outputs[0].routed_experts)[: len(s)] for out, s in zip(outputs, sequences, strict=True)]
    return {"logprobs_N": np.array(logprobs, np.float32), "ids_NLK": np.concatenate(routes)}


def _places(output: Any, tokens: Any) -> Any:
    return zip(output.prompt_logprobs, tokens, strict=True)


def _logprob(at: Any, token: int) -> float:
    """NaN where the distribution was not computed, because the position is in the cache; 0 of a first token."""
    if at is None:
        return 0.0
    return float(at[token].logprob) if token in at else float("nan")


if __name__ == "__main__":
    main()
