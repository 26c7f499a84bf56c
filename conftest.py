"""Runs every Python block of README.md and docs/ as a test, and holds each block of output against what was printed.

Asserts in helpers of tests say what they saw.
"""

import contextlib
import io
import math
import re

import hypothesis
import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

# helpers of tests fail with values too; said here, before any of them is imported
pytest.register_assert_rewrite("tests")
# a test says what is right, and never how fast: by default an example of 0.2 s fails, which a busy machine makes of any
hypothesis.settings.register_profile("foreroute", deadline=None)
hypothesis.settings.load_profile("foreroute")


def a_users_things(namespace):
    """What a reader has before the first line: a model, prompts, prompts with responses, and a loss."""
    import torch
    from transformers.utils import logging

    from foreroute.adapters import hf

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    model = hf.build_model(
        "qwen3_moe",
        seed=0,
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        initializer_range=0.3,
        max_position_embeddings=64,
    )
    tokens = torch.randint(1, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    namespace.update(
        model=model,
        batch={"input_ids": tokens, "attention_mask": torch.ones_like(tokens)},
        prompts={"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "max_new_tokens": 4},
        mask=torch.ones(4, 16, dtype=torch.long),
        policy_loss=lambda output: -output.logits.log_softmax(-1)[..., 0].mean(),
        _patch=pytest.MonkeyPatch(),
    )
    namespace["_patch"].setattr("httpx.post", server_of(namespace))


def server_of(namespace):
    """An `httpx.post` in the place of a vLLM server: the page's own `routed` model answers each request."""
    import httpx
    import torch

    from tests.wires import completion_choice

    def post(url, *, json, timeout):
        routed, prompt = namespace["routed"], json["prompt"]
        with routed.record() as recording:
            found = routed.model.eval().generate(
                torch.tensor([prompt] * json["n"]),
                max_new_tokens=json["max_tokens"],
                do_sample=True,
                output_logits=True,
                return_dict_in_generate=True,
                eos_token_id=None,
            )
        trace, choices = recording.rollout(found.sequences), []
        for s, answer in enumerate(found.sequences[:, len(prompt) :]):
            steps = zip(found.logits, answer, strict=True)
            logprobs = [float(logits[s].log_softmax(-1)[token]) for logits, token in steps]
            routes = trace.select(s).expert_ids_NLK[:-1]
            choices.append(completion_choice(prompt, answer.tolist(), routes, logprobs=logprobs, index=s))
        return httpx.Response(200, json={"choices": choices})

    return post


@pytest.fixture(scope="module")
def in_a_new_folder(tmp_path_factory):
    """Examples write their files somewhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("docs"))
        yield


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")
_python = PythonEvaluator()


def run(example: Example) -> None:
    """A block of Python; what it prints is kept for the block of output behind it."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        _python(example)
    example.namespace["_printed"] = printed.getvalue()


def compare(example: Example) -> None:
    """A block of output: the words that were printed, and numbers within a quarter, as processors round otherwise."""
    printed, shown = example.namespace["_printed"].strip(), example.parsed.strip()
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown), f"printed:\n{printed}\nthe page shows:\n{shown}"
    for was, says in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        assert math.isclose(float(was), float(says), rel_tol=0.25), f"printed {was}, the page shows {says}"


pytest_collect_file = Sybil(
    parsers=[
        CodeBlockParser(language="python", evaluator=run),
        CodeBlockParser(language="output", evaluator=compare),
        SkipParser(),
    ],
    patterns=["*.md"],
    # their blocks run on two processes, and where Megatron, TRL and verl run, by a page test of each
    excludes=["docs/experts.md", "docs/megatron.md", "docs/trl.md", "docs/verl.md"],
    setup=a_users_things,
    teardown=lambda namespace: namespace["_patch"].undo(),
    fixtures=["in_a_new_folder"],
).pytest()
