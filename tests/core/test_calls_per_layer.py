"""However many guards there are, what is the same for all layers is done once for a pass."""

from contextlib import contextmanager

from foreroute.core import attach
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import batch_of, enable_checkpointing, loss_of
from tests.core.test_routed import own_routes
from tests.python_calls import calls_per_layer
from tests.tiers import grid

BATCH = batch_of(9, 6, 4)


@grid(("use_reentrant", "most"), [(None, 16), (True, 48), (False, 52)], quick=1)
def test_a_layer_costs_few_calls(use_reentrant, most):
    """Forward and backward; recomputed layers run twice, and each of them finds its own pass."""

    @contextmanager
    def steps(layers):
        model = tiny("qwen3_moe", num_hidden_layers=layers, norm_topk_prob=False)
        enable_checkpointing(model, use_reentrant)
        routed = attach(model)
        routes, _ = own_routes(model, routed)
        with routed.replay(routes, BATCH["attention_mask"]):
            yield lambda: loss_of(model, BATCH).backward()

    assert 1 < calls_per_layer(steps) <= most
