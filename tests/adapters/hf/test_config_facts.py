"""The routed layers that are read off a `config.json` are those that the attached model of transformers has."""

import json

import pytest

from foreroute.adapters import hf
from foreroute.capture import facts_of_config
from foreroute.errors import CaptureError
from tests.adapters.hf.families import FAMILIES, build

NOT_READ = {
    "dbrx": "its experts stand in ffn_config",
    "deepseek_ocr2": "it has no default for mlp_layer_types",
    "jetmoe": "its attention blocks route too",
    "longcat_flash": "it has experts without weights",
    "switch_transformers": "it has an encoder and a decoder",
    "zaya": "its routers have one expert more than the configuration says",
}
NAMES = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_experts_per_tok", "moe_k")
NAMES = {*NAMES, "num_experts_per_token", "top_k_experts", "moe_topk", "num_hidden_layers", "model_type"}
OTHERWISE = [
    ("qwen2_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 5}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 6}),
    ("qwen3_next", {"decoder_sparse_step": 3, "num_hidden_layers": 6}),
    ("qwen3_vl_moe", {"mlp_only_layers": [0, 2]}),
    ("qwen3_vl_moe", {"decoder_sparse_step": 2}),
    ("qwen3_omni_moe", {"decoder_sparse_step": 2}),
    ("flint", {"num_hidden_layers": 5}),
    ("flint", {"mlp_only_layers": [3]}),
    ("jamba", {"expert_layer_period": 3, "expert_layer_offset": 0, "num_hidden_layers": 5}),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_start_index": 2, "num_hidden_layers": 6}),
    ("ernie4_5_moe", {"moe_layer_end_index": 1}),
    ("llama4", {"interleave_moe_layer_step": 2, "num_hidden_layers": 5}),
    ("llama4", {"moe_layers": [0, 2]}),
    ("deepseek_v2", {"first_k_dense_replace": 0}),
    ("deepseek_v3", {"first_k_dense_replace": 2}),
    ("deepseek_v32", {"first_k_dense_replace": 2}),
    ("dots1", {"first_k_dense_replace": 2}),
    ("glm4_moe", {"first_k_dense_replace": 2}),
    ("mistral4", {"first_k_dense_replace": 0}),
    ("exaone_moe", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    ("axk1", {"moe_layer_freq": 2, "num_hidden_layers": 5}),
    ("dots3_note", {"moe_layer_freq": [0, 0, 1]}),
    ("minimax_m3_vl", {"moe_layer_freq": [0, 1, 1]}),
    ("inkling", {"dense_mlp_idx": 2}),
    ("afmoe", {"num_dense_layers": 2}),
    ("cohere2_moe", {"first_k_dense_replace": 1}),
    ("mellum", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    ("muse_spark", {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    ("lfm2_moe", {"num_dense_layers": 0}),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MEM*E-", "num_hidden_layers": 6}),
    ("step3p7", {"mlp_layer_types": None, "moe_layers_enum": "0,2"}),
    ("step3p7", {"mlp_layer_types": None, "num_hidden_layers": 5}),
    ("deepseek_v4", {"mlp_layer_types": None, "num_hash_layers": 2}),
    ("hunyuan_v1_moe", {"moe_topk": [2, 2, 2]}),
]
NO_DEFAULT = {
    "gemma4": "by default it has no experts",
    "nemotron_h": "it has no default for its blocks",
    "qwen4_exp": "it cannot be built with five layers",
}
DENSE_FIELDS = ("first_k_dense_replace", "mlp_layer_types", "num_dense_layers", "mlp_only_layers")


def written(model):
    return json.loads(model.config.to_json_string(use_diff=True))


def require_read(config, model):
    facts = facts_of_config(json.loads(json.dumps(config)))
    spec = hf.attach(model).spec
    assert (facts.spec.num_experts, facts.spec.top_k) == (spec.num_experts, spec.top_k)
    assert [str(layer) for layer in facts.spec.layers] == [str(layer) for layer in spec.layers]
    assert facts.num_hidden_layers == model.config.num_hidden_layers


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layers_of_every_family_are_read_as_they_are_or_refused_by_name(name):
    model = build(name)
    if name in NOT_READ:
        with pytest.raises(CaptureError, match="pass a trace of the model instead"):
            facts_of_config(written(model))
    else:
        require_read(written(model), model)


@pytest.mark.parametrize(("name", "fields"), OTHERWISE, ids=lambda value: str(value)[:40])
def test_other_dense_layers_than_those_of_the_default_are_read(name, fields):
    model = build(name, **fields)
    require_read(written(model), model)


@pytest.mark.parametrize(("name", "fields"), OTHERWISE, ids=lambda value: str(value)[:40])
def test_a_configuration_as_it_lies_on_a_hub_is_read_alike(name, fields):
    """With the names of its time, which transformers does not write."""
    model = build(name, **fields)
    config = {key: value for key, value in written(model).items() if key in NAMES}
    require_read(config | {key: value for key, value in fields.items() if value is not None}, model)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in {*NOT_READ, *NO_DEFAULT}])
def test_what_a_configuration_leaves_out_has_the_default_of_its_family(name):
    model = build(name, num_hidden_layers=5, **dict.fromkeys(DENSE_FIELDS), **_of_five_layers(name))
    require_read({key: value for key, value in written(model).items() if key in NAMES}, model)


def _of_five_layers(name):
    """Fields whose lists have an entry for each layer."""
    return {
        "lfm2_moe": {"layer_types": ["conv"] + ["full_attention"] * 4},
    }.get(name, {})
