"""What a `config.json` cannot tell is refused by name, whatever stands in it."""

import json

import pytest

from foreroute.capture import facts_of_config
from foreroute.errors import CaptureError

QWEN = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4}
DEEPSEEK = {"model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 5}
GLM = {"model_type": "glm4_moe_lite", "n_routed_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}


def layers(config):
    return [layer.index for layer in facts_of_config(config).spec.layers]


def test_the_routed_layers_are_those_that_the_family_means():
    assert layers(QWEN) == [0, 1, 2, 3]
    assert layers({**QWEN, "decoder_sparse_step": 2}) == [1, 3]
    assert layers({**QWEN, "decoder_sparse_step": 2, "mlp_only_layers": [3]}) == [1]
    assert layers(DEEPSEEK) == [3, 4]
    assert layers({**DEEPSEEK, "model_type": "kimi_k2", "first_k_dense_replace": 1}) == [1, 2, 3, 4]
    assert layers(GLM) == [1, 2]
    assert facts_of_config(DEEPSEEK).num_hidden_layers == 5
    assert facts_of_config(DEEPSEEK).spec.model == "deepseek_v3"
    assert facts_of_config({**QWEN, "num_experts_per_tok": 8}).spec.top_k == 8


def test_the_text_model_of_a_larger_one_is_meant():
    inner = {**QWEN, "model_type": "qwen3_vl_moe_text", "mlp_only_layers": [0]}
    assert layers({"model_type": "qwen3_vl_moe", "text_config": inner}) == [1, 2, 3]
    assert layers({"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": inner}}) == [1, 2, 3]
    del inner["model_type"]
    assert layers({"model_type": "qwen3_vl_moe", "text_config": inner}) == [1, 2, 3]


def test_the_type_of_the_text_model_goes_before_that_of_the_whole():
    assert layers({"model_type": "brand_new_vl", "text_config": {**QWEN, "mlp_only_layers": [0]}}) == [1, 2, 3]


def test_a_list_of_types_goes_before_the_other_fields_that_a_family_reads():
    types = ["sparse", "dense", "sparse", "sparse", "dense"]
    config = {**DEEPSEEK, "model_type": "deepseek_v32", "first_k_dense_replace": 2}
    assert layers(config) == [2, 3, 4]
    assert layers({**config, "mlp_layer_types": types}) == [0, 2, 3]


def test_a_field_that_agrees_may_stand_beside_the_one_that_is_read():
    assert layers({**GLM, "first_k_dense_replace": 1, "moe_layer_freq": [0, 1, 1]}) == [1, 2]
    assert layers({**DEEPSEEK, "moe_layer_freq": 1, "mlp_only_layers": []}) == [3, 4]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN, "model_type": "brand_new_moe"}, "model_type 'brand_new_moe', whose layers are not known"),
        ({**QWEN, "model_type": None}, "model_type None"),
        ({"text_config": {}}, "model_type None"),
        ({**QWEN, "num_experts": None}, "no num_experts"),
        ({**QWEN, "num_experts": 8, "num_local_experts": 4}, "num_experts 8 and num_local_experts 4"),
        ({**QWEN, "num_experts": [8, 4]}, r"\[8, 4\]"),
        ({**QWEN, "num_experts_per_tok": 9}, "9 picks of 8 experts"),
        ({**QWEN, "num_experts": 0}, "num_experts of the configuration is 0"),
        ({**QWEN, "num_hidden_layers": None}, "no num_hidden_layers"),
        ({**QWEN, "mlp_only_layers": [0, 1, 2, 3]}, "no layer with experts"),
        ({**QWEN, "first_k_dense_replace": 1}, "first_k_dense_replace 1, which qwen3_moe does not read"),
        ({**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq 2, which deepseek_v3 does not read"),
        ({**DEEPSEEK, "moe_layer_freq": [0, 1, 0, 1, 1]}, "moe_layer_freq .*, which deepseek_v3 does not read"),
        ({**GLM, "first_k_dense_replace": 2}, r"other layers are dense than \[0\]"),
        ({**GLM, "mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types of 2 entries and 3 layers"),
        ({**GLM, "mlp_layer_types": ["dense", "sparse", "spare"]}, "mlp_layer_types with 'spare'"),
        ({**GLM, "per_layer_config": {"1": {"num_experts": 4}}}, "per_layer_config with experts"),
        ({**GLM, "per_layer_config": {"1": {"num_experts_per_tok": 1}}}, "per_layer_config with experts"),
        *(
            ({**GLM, field: value}, rf"{field} .*, which glm4_moe_lite does not read, .* are dense than \[0\]")
            for field, value in (
                ("mlp_only_layers", [2]),
                ("num_dense_layers", 2),
                ("dense_mlp_idx", 2),
                ("decoder_sparse_step", 2),
                ("interleave_moe_layer_step", 2),
                ("moe_layer_freq", [0, 0, 1]),
                ("moe_layers", [2]),
                ("moe_layers_enum", "2"),
                ("expert_layer_period", 2),
                ("moe_layer_interval", 2),
            )
        ),
        ({**QWEN, "mlp_layer_types": ["dense", "sparse"] * 2}, "mlp_layer_types .*, which qwen3_moe does not read"),
        ({**QWEN, "model_type": "nemotron_h", "hybrid_override_pattern": "ME" * 40_000}, "no layers_block_type, and"),
        ({**QWEN, "mlp_only_layers": [4] * 70_000}, "expected a list of at most 65536"),
        ({**QWEN, "num_hidden_layers": 65537}, "num_hidden_layers of the configuration is 65537"),
        ({**QWEN, "model_type": "minimax_m3_vl", "moe_layer_freq": [0, 1, 2, 1]}, "an entry of moe_layer_freq is 2"),
        ({**QWEN, "model_type": "nemotron_h"}, "no layers_block_type"),
        ({**QWEN, "model_type": "nemotron_h", "hybrid_override_pattern": "MEX"}, "hybrid_override_pattern 'MEX'"),
        ({**QWEN, "model_type": "nemotron_h", "layers_block_type": ["moe", "new"]}, "layers_block_type with 'new'"),
        ({**QWEN, "model_type": "step3p5", "moe_layers_enum": "1,x"}, "moe_layers_enum '1,x'"),
        ({**QWEN, "model_type": "gemma4_text"}, "no layer with experts"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(config, message):
    with pytest.raises(CaptureError, match=message) as error:
        facts_of_config(config)
    assert "pass a trace" in str(error.value) or "expected an integer" in str(error.value)


STRANGE = [True, 2.5, -1, "2", "", [], [[]], {}, 10**30, float("nan"), [None], ["a"], [2.5], [-1], [10**30]]
FIELDS = {
    "qwen3_moe": ("num_experts", "num_experts_per_tok", "num_hidden_layers", "decoder_sparse_step", "mlp_only_layers"),
    "deepseek_v3": ("first_k_dense_replace", "model_type", "moe_layer_freq"),
    "glm4_moe_lite": ("mlp_layer_types",),
    "jamba": ("expert_layer_period", "expert_layer_offset"),
    "ernie4_5_moe": ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
    "llama4": ("moe_layers", "interleave_moe_layer_step"),
    "minimax_m3_vl": ("moe_layer_freq",),
    "nemotron_h": ("layers_block_type", "hybrid_override_pattern"),
    "step3p5": ("moe_layers_enum",),
    "deepseek_v4": ("num_hash_layers",),
    "gemma4": ("enable_moe_block",),
}
RIGHT = [
    ("mlp_only_layers", "[]"),
    ("moe_layer_end_index", "-1"),
    ("enable_moe_block", "True"),
    ("moe_layers_enum", "'2'"),
]


@pytest.mark.parametrize(("family", "field"), [(f, name) for f, names in FIELDS.items() for name in names])
def test_strange_values_are_refused(family, field):
    for value in STRANGE:
        config = {**QWEN, "model_type": family, field: value}
        if (field, repr(value)) in RIGHT:
            assert facts_of_config(config)
            continue
        with pytest.raises(CaptureError):
            facts_of_config(config)


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("qwen3_moe", "num_hidden_layers"),
        ("qwen3_moe", "num_experts_per_tok"),
        ("qwen3_moe", "decoder_sparse_step"),
        ("llama4", "interleave_moe_layer_step"),
        ("jamba", "expert_layer_period"),
        ("ernie4_5_moe", "moe_layer_interval"),
        ("minimax_m3_vl", "moe_layer_freq"),
    ],
)
def test_what_layers_are_counted_by_is_no_zero(family, field):
    with pytest.raises(CaptureError, match=f"{field} of the configuration is 0; expected an integer from 1"):
        facts_of_config({**QWEN, "model_type": family, field: 0})


@pytest.mark.parametrize(
    "config", [None, 5, "{}", [], [QWEN], {"text_config": 5}, {"text_config": []}, json.dumps(QWEN)]
)
def test_what_is_no_configuration_is_refused(config):
    with pytest.raises(CaptureError, match="a model's configuration is a JSON object; found "):
        facts_of_config(config)
