"""The layers that a configuration tells, on tensors without values, are those of the model with weights."""

import json

import pytest

from foreroute.adapters import hf
from foreroute.adapters.checkpoint import ServedModel
from foreroute.errors import ConfigError
from tests.adapters.hf.families import SIZES, SPARSE, build
from tests.adapters.hf.family_checks import attached, require_told, written
from tests.tiers import grid

OTHERWISE = [  # one for each way in which configurations name dense layers
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 6}),
    ("jamba", {"expert_layer_period": 3, "expert_layer_offset": 0, "num_hidden_layers": 5}),
    ("llama4", {"interleave_moe_layer_step": 2, "num_hidden_layers": 5}),
    ("deepseek_v3", {"first_k_dense_replace": 2}),
    ("dots3_note", {"moe_layer_freq": [0, 0, 1]}),
    ("step3p7", {"mlp_layer_types": None, "moe_layers_enum": "0,2"}),
    ("deepseek_v4", {"mlp_layer_types": None, "num_hash_layers": 2}),
]
CHOOSING = [(name, SPARSE[name]) for name in ("deepseek_v4", "glm5_next", "minimax_m3_vl")]


@grid(("name", "fields"), OTHERWISE + CHOOSING, quick=1)
def test_other_layers_than_those_of_the_default_are_seen(name, fields, tmp_path):
    """Dense ones in other places, and layers with indexers."""
    model, routed = attached(name, **fields)
    assert routed.indexers is not None or fields is not SPARSE.get(name)
    require_told(written(tmp_path, model), model, routed)


def test_a_folder_says_all_that_decoding_needs(tmp_path):
    model = build("deepseek_v32", **SPARSE["deepseek_v32"])
    written(tmp_path, model)
    served, routed = ServedModel.at(tmp_path), hf.attach(model)
    assert (served.spec, served.indexers) == (routed.spec, routed.indexers)
    assert (served.vocabulary_size, served.max_positions) == (50, 64)


READ = ("vocab_size", "hidden_size", "num_hidden_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
DECODER = {name: SIZES[name] for name in READ} | {"layer_types": ["full_attention"] * 3, "head_dim": 16}


def flat(model_type="qwen3_5_moe"):
    """All sizes at the top, as converters of text-only checkpoints write them."""
    return DECODER | {"model_type": model_type}


def within(top, **text):
    """What is in the table of the decoder, and what beside it."""
    return {"model_type": "qwen3_5_moe", "text_config": text} | top


@grid(
    "values",
    [
        flat("qwen3_5_moe_text"),
        within({}, **DECODER),
        within({"num_hidden_layers": 3, "vocab_size": 50}, **DECODER),
        within({"hidden_size": 4096, "eos_token_id": 7}, **DECODER),
        {"thinker_config": {"text_config": DECODER}, "model_type": "qwen3_omni_moe"},
    ],
    quick=2,
)
def test_sizes_where_transformers_reads_them_are_read(values, tmp_path):
    spec = spec_of(values, tmp_path)
    assert (spec.num_layers, spec.num_experts, spec.top_k) == (3, 8, 2)


@pytest.mark.parametrize(
    "values", [flat(), within(flat()), within({"num_experts": 8}, num_hidden_layers=3), flat("llama4")]
)
def test_sizes_that_transformers_does_not_read_are_refused(values, tmp_path):
    with pytest.raises(ConfigError, match=r"has \w+ = \d+ beside text_config, .* takes .* set model_type to \w+_text"):
        spec_of(values, tmp_path)


def spec_of(values, folder):
    (folder / "config.json").write_text(json.dumps(values))
    return ServedModel.at(folder).spec
