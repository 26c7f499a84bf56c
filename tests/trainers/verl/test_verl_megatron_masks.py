"""verl's Megatron engine that scores on sampling masks, under each kind of parallelism, against dense float64."""

import pytest

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")
pytest.importorskip("mbridge", reason="there is no mbridge in this environment: run `make night PART=verl`")

from examples.verl import verl_on_cpu  # noqa: F401  before verl
from examples.verl.tiny_checkpoint import save_policy
from tests.trainers.verl.masked_book import Scores, require_learned, require_scored
from tests.trainers.verl.verl_ranks import run_each

SEQUENCES = 8
TENSOR, CONTEXT = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}
VIRTUAL = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
RUNS = {
    "context, tensor": CONTEXT | TENSOR,
    "context, packed to a length": CONTEXT | {"pad_to_length": True, "pad_to_length_bucket": 64},
    "virtual, tensor": VIRTUAL | TENSOR,
    "padded, context, tensor": CONTEXT | TENSOR | {"use_remove_padding": False},
    "tensor, fused": TENSOR | {"use_fused_kernels": True},
}
FUSED = "tensor, fused"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"), mlp_only_layers=[], num_hidden_layers=4)


@pytest.fixture(scope="module")
def scores(policy):
    return Scores(policy, count=SEQUENCES)


@pytest.fixture(scope="module")
def found(policy):
    return run_each(4, "megatron_worker.score", policy, RUNS)


@pytest.mark.shows(
    "verl, Megatron engine", "`top_p`, `top_k` under vLLM: scored on sampling masks, with TP, CP, PP, packed and padded"
)
@pytest.mark.parametrize("name", [name for name in RUNS if name != FUSED])
def test_log_probs_and_gradients_are_those_of_dense_logits_outside_of_the_sets_at_minus_infinity(name, found, scores):
    rows, k3 = {}, []
    for rank in found[name]:
        for number, row in enumerate(rank["log_probs"], start=rank["first"]):
            rows.setdefault(number, row)
        k3 += rank["k3"]
        require_learned(rank["gradients"], by_expert(scores.gradients))
    assert sorted(rows) == list(range(SEQUENCES))
    require_scored([rows[number] for number in sorted(rows)], scores)
    assert k3
    assert max(k3) < 1e-9


@pytest.mark.shows(
    "verl, Megatron engine", "`use_fused_kernels` with sampling masks", refused="their log-probs are of all tokens"
)
def test_log_probs_made_past_the_logits_are_noticed(found):
    assert all("past its logits" in rank["refused"] for rank in found[FUSED])


def by_expert(gradients):
    """Gradients of stacked experts as mbridge names them, one by one."""
    found = {}
    for name, gradient in gradients.items():
        begin, stacked, kind = name.partition(".experts.")
        for number, each in enumerate(gradient if stacked else ()):
            if kind == "gate_up_proj":
                for part, half in zip(("gate_proj", "up_proj"), each.chunk(2), strict=True):
                    found[f"{begin}{stacked}{number}.{part}.weight"] = half
            else:
                found[f"{begin}{stacked}{number}.{kind}.weight"] = each
        if not stacked:
            found[name] = gradient
    return found
