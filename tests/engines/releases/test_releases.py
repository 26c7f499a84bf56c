"""Releases of vLLM against the table that is expected, by night; and what the comparison sees, without an engine."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests.engines.releases.cases import equal, prompt, sequence
from tests.engines.releases.reference import Reference, planted
from tests.engines.releases.results import numbers, run
from tests.wires import npy_text

PYTHONS = os.environ.get("FOREROUTE_VLLM_PYTHONS", "").split()
"""Interpreters that have a release each; `make night PART=engines` names them."""
BEFORE_31, FROM_31 = [(0, 28), (0, 30)], [(0, 32)]
RUN = BEFORE_31 + FROM_31
OTHERWISE = {
    "prompt start at the prompt's length": {(0, 28): ("ended", "prompt_start < request.num_prompt_tokens")},
    "prompt start beyond the prompt": dict.fromkeys(RUN, ("refused", r"between 0 and the prompt length \(8\)"))
    | {(0, 28): ("ended", "prompt_start < request.num_prompt_tokens")},
    "streaming, `/v1/completions`": dict.fromkeys(RUN, ("absent", "none of 6 chunks")),
    "a seed, and chunked prefill": dict.fromkeys(BEFORE_31, ("ended", "Error")),
    "started without stand-ins": {(0, 28): ("refused", "not supported with monolithic MoE kernel")}
    | dict.fromkeys(FROM_31, ("refused", "requires Model Runner V2")),
    "started without prefix caching": dict.fromkeys(FROM_31, ("refused", "requires prefix caching")),
}
"""What is not equal to the model: by release, the verdict and a pattern of the words."""


@pytest.mark.exhaustive
@pytest.mark.skipif(not PYTHONS, reason="FOREROUTE_VLLM_PYTHONS names no interpreter")
@pytest.mark.parametrize("python", PYTHONS or [""])
def test_a_release_answers_as_the_table_says(python):
    results = run(Path(python))
    results.keep()
    release, unexpected = numbers(results.release)[:2], []
    for case, seen in results.outcomes.items():
        verdict, words = OTHERWISE.get(case, {}).get(release, ("equal", r"\d+ rows|row \d+"))
        if seen.verdict != verdict or not re.search(words, seen.words):
            unexpected.append(f"{case}: expected {verdict}, {words!r}; was {seen.verdict}: {seen.words}")
    assert not unexpected, "\n".join([f"vLLM {results.release}", *unexpected])


@pytest.fixture(scope="module")
def reference():
    return Reference(0)


def answered(reference, tokens, num_prompt):
    """A choice as vLLM writes it, with the routes and log-probs of the model itself."""
    sets_TLK, logprobs_TV = reference.forward(np.array(tokens, np.int32))
    rows = np.arange(num_prompt - 1, len(tokens) - 1)
    choice = {"token_ids": tokens[num_prompt:], "routed_experts": npy_text(sets_TLK[:-1].astype(np.uint8))}
    return choice, logprobs_TV[rows, np.array(tokens)[rows + 1]].tolist()


def test_one_other_expert_of_one_row_is_seen(reference):
    tokens = prompt(30, 1)
    found = sequence(tokens[:24], *answered(reference, tokens, 24))
    assert equal(reference, [found]) == "1 sequence, 29 rows"
    assert reference.differing(planted(found.trace, row=27, layer=2)) == [(27, 2)]


@pytest.mark.parametrize("place", [0, 5])
def test_one_other_log_prob_is_seen(reference, place):
    tokens = prompt(30, 2)
    choice, logprobs = answered(reference, tokens, 24)
    logprobs[place] += 0.002
    with pytest.raises(AssertionError, match=r"log-probs lie 0\.00[12]"):
        equal(reference, [sequence(tokens[:24], choice, logprobs)])
