"""MoE scripts of verl, by what decides about replay, and what is said of them before Ray starts.

Settings are those of the scripts in `examples/` of verl (August 2026), composed with the configuration of the release
at hand. foreroute's own lines are added, and nothing else.
"""

import pytest

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from hydra import compose, initialize_config_module

from foreroute.errors import ConfigError
from foreroute.trainers.verl.plugin import require_script
from foreroute.trainers.verl.settings import MASKS

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
ROUTES = f"{ROLLOUT}.enable_rollout_routing_replay=True"
LINES = {
    "fsdp": [f"{MODEL}.external_lib=foreroute.trainers.verl.fsdp", f"+{ACTOR}.fsdp_config.router_replay.mode=R3"],
    "megatron": [f"{MODEL}.external_lib=foreroute.trainers.verl.megatron", f"{ACTOR}.megatron.router_replay.mode=R3"],
}
PLANS = f"{ACTOR}.megatron._target_=foreroute.trainers.verl.planning.PlanningMegatronConfig"
FUSED = f"{MODEL}.use_fused_kernels=True"
ULYSSES = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"
FLEX = f"+{ACTOR}.megatron.override_transformer_config.moe_token_dispatcher_type=flex"
SIZES = [f"{ACTOR}.megatron.{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context")]
SCRIPTS = {
    "qwen3_30b_a3b_fsdp": ["fsdp", f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.use_kl_loss=True"],
    "qwen3_vl_30b_a3b_fsdp": ["fsdp", f"{ACTOR}.strategy=fsdp2", FUSED, ULYSSES],
    "deepseek_v3_671b_megatron, planned": ["megatron", FUSED, FLEX, *SIZES, PLANS],
    "lora, qwen3_30b_a3b_megatron": ["megatron", FUSED, f"{MODEL}.lora.rank=16", *SIZES],
}
REFUSED = {"lora, qwen3_30b_a3b_megatron": "lora.rank is set"}


def composed(engine, *overrides):
    overrides = [f"{ACTOR}.use_dynamic_bsz=True", f"{MODEL}.use_remove_padding=True", *overrides]
    with initialize_config_module("verl.trainer.config", version_base=None):
        given = ["model_engine=megatron"] if engine == "megatron" else []
        return compose("ppo_trainer", overrides=[*given, *overrides])


def said_of(config):
    """What stands in the way, a line each."""
    try:
        require_script(config)
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.shows(
    "verl, Megatron engine",
    "LoRA (`model.lora.rank`)",
    refused="verl leaves it to Megatron-Bridge, under which replay was not tested",
)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_verl_is_taken_as_it_stands_or_all_that_is_in_its_way_is_named(name):
    engine, *settings = SCRIPTS[name]
    said = said_of(composed(engine, *settings, *LINES[engine], ROUTES))
    assert len(said) == (name in REFUSED)
    assert REFUSED.get(name, "") in "".join(said)


@pytest.mark.shows(
    "verl, Megatron engine",
    "`packing=routes` with `clip_cov`, `kl_cov`, `geo_mean`",
    refused="their gradients depend on groups",
)
def test_losses_that_go_by_micro_batches_are_named_where_these_are_packed_by_routes():
    packing = [*LINES["megatron"], ROUTES, PLANS, f"+{ACTOR}.megatron.packing=routes"]
    assert said_of(composed("megatron", *packing)) == []
    fixed = [f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"]
    said = said_of(composed("megatron", *packing, *fixed, f"{ACTOR}.policy_loss.loss_mode=geo_mean"))
    assert "packing is routes, and use_dynamic_bsz is off" in said[1]
    assert "loss_mode is geo_mean" in said[2]


def test_sampling_that_the_trainer_does_not_score_on_is_warned_of():
    lines = [*SCRIPTS["qwen3_30b_a3b_fsdp"][1:], *LINES["fsdp"], ROUTES]
    for engine, remedy in (("vllm", r"name foreroute\.trainers\.verl\.sampling_masks"), ("sglang", "leave them out$")):
        cut = [f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=40"]
        with pytest.warns(UserWarning, match=rf"top_p=0\.9, top_k=40 leave tokens out.*{remedy}"):
            require_script(composed("fsdp", *lines, *cut))


@pytest.mark.shows("verl, FSDP engine", "sampling masks of SGLang", refused="verl hands none on")
@pytest.mark.shows("verl, Megatron engine", "sampling masks of SGLang", refused="verl hands none on")
def test_what_sampling_masks_need_or_do_not_go_with_is_named():
    library = f"{MODEL}.external_lib=[foreroute.trainers.verl.{{}},{MASKS}]".format
    masks = [library("fsdp"), LINES["fsdp"][1], ROUTES, f"{ROLLOUT}.top_p=0.9"]
    vllm = [f"{ROLLOUT}.name=vllm", f"+{ROLLOUT}.engine_kwargs.vllm.return_sampling_mask=True", f"{ROLLOUT}.top_k=64"]
    greedy = [f"{ROLLOUT}.val_kwargs.top_k=1", f"{ROLLOUT}.val_kwargs.temperature=1"]
    assert said_of(composed("fsdp", *masks, *vllm, *greedy)) == []
    said = "\n".join(said_of(composed("fsdp", *masks, f"{ROLLOUT}.name=sglang", FUSED)))
    for each in ("4 settings", "from vLLM alone", "return_sampling_mask=True", "use_fused_kernels", "rollout.top_k"):
        assert each in said
