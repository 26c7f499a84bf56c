"""MoE scripts of verl and docs/verl.md, by what decides about replay, and what is said of them before Ray starts.

Settings are those of the scripts in `examples/` of verl (August 2026), composed with the configuration of the release
at hand. foreroute's own lines are added, and nothing else. Of verl's losses, gradients in float64 say which depend on
the sequences that share a micro-batch.
"""

import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

# isort: off
from examples.verl import verl_on_cpu  # noqa: F401  before verl
from examples.verl import megatron_on_cpu  # noqa: F401  before Megatron

# isort: on
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import McoreActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from examples.verl import demo_cluster
from foreroute.errors import ConfigError
from foreroute.plan import PlanOptions
from foreroute.trainers.verl import plugin
from foreroute.trainers.verl.planning import PlanningMegatronConfig
from foreroute.trainers.verl.plugin import require_script
from foreroute.trainers.verl.settings import MASKS, grouping_refusals, replay_of
from tests.trainers.verl.verl_batches import SPEC, nested, padded, sequences, unpadded

ROOT = Path(__file__).parents[3]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
ROUTES = f"{ROLLOUT}.enable_rollout_routing_replay=True"
LINES = {
    "fsdp": [f"{MODEL}.external_lib=foreroute.trainers.verl.fsdp", f"+{ACTOR}.fsdp_config.router_replay.mode=R3"],
    "megatron": [f"{MODEL}.external_lib=foreroute.trainers.verl.megatron", f"{ACTOR}.megatron.router_replay.mode=R3"],
}
PLANS = f"{ACTOR}.megatron._target_=foreroute.trainers.verl.planning.PlanningMegatronConfig"
PACKED = [PLANS, f"+{ACTOR}.megatron.plan.packing=routes"]
FUSED = f"{MODEL}.use_fused_kernels=True"
FLEX = f"+{ACTOR}.megatron.override_transformer_config.moe_token_dispatcher_type=flex"
SIZES = [f"{ACTOR}.megatron.{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context")]
LORA = [FUSED, f"{MODEL}.lora.rank=16", *SIZES]
ON_MASKS = [f"{MODEL}.external_lib=[foreroute.trainers.verl.fsdp,{MASKS}]", f"{ROLLOUT}.top_p=0.9"]
SCRIPTS = {
    # an engine, settings beside our lines, and what is in their way
    "qwen3_30b_a3b_fsdp": ("fsdp", [f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.use_kl_loss=True"], []),
    "deepseek_v3_671b_megatron, planned": ("megatron", [FUSED, FLEX, *SIZES, PLANS], []),
    "lora, qwen3_30b_a3b_megatron": ("megatron", LORA, ["lora.rank is set"]),
    "packed": ("megatron", PACKED, []),
    "packed, by a loss that goes by micro-batches": (
        "megatron",
        [
            *(*PACKED, f"{ACTOR}.policy_loss.loss_mode=geo_mean"),
            *(f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"),
        ],
        ["packing is routes, and use_dynamic_bsz is off", "loss_mode is geo_mean"],
    ),
    "masks": (
        "fsdp",
        [
            *(*ON_MASKS, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.top_k=64"),
            f"+{ROLLOUT}.engine_kwargs.vllm.return_sampling_mask=True",
            *(f"{ROLLOUT}.val_kwargs.top_k=1", f"{ROLLOUT}.val_kwargs.temperature=1"),
        ],
        [],
    ),
    "masks of SGLang": (
        "fsdp",
        [*ON_MASKS, f"{ROLLOUT}.name=sglang", FUSED],
        ["from vLLM alone", "return_sampling_mask=True", "use_fused_kernels", "rollout.top_k"],
    ),
}


def composed(engine, *overrides):
    overrides = [f"{ACTOR}.use_dynamic_bsz=True", f"{MODEL}.use_remove_padding=True", *overrides]
    with initialize_config_module("verl.trainer.config", version_base=None):
        given = ["model_engine=megatron"] if engine == "megatron" else []
        return compose("ppo_trainer", overrides=[*given, *overrides])


@pytest.mark.shows(
    "verl, Megatron engine",
    "LoRA (`model.lora.rank`)",
    refused="verl leaves it to Megatron-Bridge, under which replay was not tested",
)
@pytest.mark.shows(
    "verl, Megatron engine",
    "`plan.packing=routes` with `clip_cov`, `kl_cov`, `geo_mean`",
    refused="their gradients depend on groups",
)
@pytest.mark.shows("verl, FSDP engine", "sampling masks of SGLang", refused="verl hands none on")
@pytest.mark.shows("verl, Megatron engine", "sampling masks of SGLang", refused="verl hands none on")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_verl_is_taken_as_it_stands_or_all_that_is_in_its_way_is_named(name):
    engine, settings, expected = SCRIPTS[name]
    config = composed(engine, *LINES[engine], ROUTES, *settings)
    with pytest.raises(ConfigError) if expected else nullcontext() as refused:
        require_script(config)
    if expected:
        said = str(refused.value)
        assert len(said.splitlines()) == len(expected) + (len(expected) > 1), said
        for each in expected:
            assert each in said


def test_options_of_plans_are_read_and_those_that_verl_cannot_carry_out_are_refused():
    def engine(**options):
        lines = [f"+{ACTOR}.megatron.plan.{name}={value}" for name, value in options.items()]
        return omega_conf_to_dataclass(composed("megatron", PLANS, *lines).actor_rollout_ref.actor).engine

    found = engine(tolerance=0.5, slots="shared", packing="routes").planned_for(2)[2]
    assert found == PlanOptions(tolerance=0.5, slots="shared", packing="routes")
    for options, said in (
        ({"tolerence": 0.5}, r"tolerence.*tolerance\?"),
        ({"home_moves": "all"}, "home_moves=None.*expected 0"),
        ({"replicas": "false", "traffic": "true"}, "traffic.*replicas"),
        ({"packing": "tokens"}, "packing.*'tokens'"),
    ):
        with pytest.raises(Exception, match=said) as caught:
            engine(**options)
        assert isinstance(caught.value.__cause__ or caught.value, ConfigError)


def test_verl_asks_where_it_validates_a_configuration(monkeypatch):
    monkeypatch.setattr(plugin.verl_config, "validate_config", lambda config: None)
    assert (
        f'[project.entry-points."verl.plugins"]\nforeroute = "{plugin.__name__}"'
        in (ROOT / "pyproject.toml").read_text()
    )
    plugin.register()
    config = composed("megatron", *LORA, *LINES["megatron"], ROUTES)
    with pytest.raises(ConfigError, match=r"lora\.rank"):
        plugin.verl_config.validate_config(config)


def test_sampling_that_the_trainer_does_not_score_on_is_warned_of():
    lines = [*SCRIPTS["qwen3_30b_a3b_fsdp"][1], *LINES["fsdp"], ROUTES]
    for engine, remedy in (("vllm", r"name foreroute\.trainers\.verl\.sampling_masks"), ("sglang", "leave them.*out$")):
        cut = [f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=40"]
        with pytest.warns(UserWarning, match=rf"top_p=0\.9, top_k=40 .*{remedy}"):
            require_script(composed("fsdp", *lines, *cut))


def test_the_block_of_the_page_runs():
    [code] = FENCE.findall((ROOT / "docs" / "verl.md").read_text())
    exec(code, {"batch": padded(sequences(3)), "spec": SPEC})


def test_verl_reads_the_lines_of_the_page_and_of_the_example_as_meant():
    page = (ROOT / "docs" / "verl.md").read_text().partition("## Sampling masks")[0].split("## Megatron", 1)
    fsdp, lines = (re.findall(r"^    (actor.*|\+.*?) *$", part, re.MULTILINE) for part in page)
    script = (ROOT / "examples" / "verl" / "grpo_r3.sh").read_text()
    command = script[script.index("python3 -m") :].replace("$DATA", "data").replace("$MODEL", "model")
    words = [word for word in shlex.split(command) if "=" in word]
    assert len(fsdp) == 3
    assert set(words) >= set(fsdp)
    config = composed("fsdp", *words)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert (actor.engine.strategy, replay_of(actor.engine)) == ("fsdp2", "R3")
    assert "router_replay" not in config.actor_rollout_ref.ref.fsdp_config
    assert config.actor_rollout_ref.model.external_lib == "foreroute.trainers.verl.fsdp"

    names = {line.partition("=")[0] for line in demo_cluster.SETTINGS + demo_cluster.MEGATRON}
    assert lines
    assert {line.partition("=")[0] for line in lines} <= names
    config = composed("megatron", *lines)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor.engine, PlanningMegatronConfig)
    assert (actor.engine.strategy, replay_of(actor.engine)) == ("megatron", "R3")
    assert (actor.engine.redundant_slots, actor.engine.hardware) == (2, "h100")
    assert actor.engine.planned_for(2)[2] == PlanOptions()
    # the reference is left alone
    assert config.actor_rollout_ref.ref.megatron["_target_"] == "verl.workers.config.McoreEngineConfig"
    assert config.actor_rollout_ref.ref.megatron.router_replay.mode == "disabled"


COUNT = 12
GROUPINGS = ([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], [[11, 2, 7], [0, 5, 9, 3], [4, 1, 6, 8, 10]])
AGGREGATED = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
NORM = {"loss_agg_mode": "seq-mean-token-sum-norm"}
NORMALIZED = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True}
REFUSED = {
    **{mode: ({"loss_mode": mode}, {}) for mode in ("clip_cov", "kl_cov", "geo_mean")},
    "rollout_is_batch_normalize": ({"loss_mode": "bypass_mode", "rollout_correction": NORMALIZED}, {}),
    "loss_scale_factor": ({}, NORM),
}


def actor(loss, **settings):
    drawn = {"clip_cov_lb": -9.0, "clip_cov_ub": 9.0, "clip_cov_ratio": 0.2, "kl_cov_ratio": 0.2, "dro_beta": 0.1}
    given = {"rollout_n": 4, "use_dynamic_bsz": True, "entropy_coeff": 0.01, "use_kl_loss": True} | settings
    return McoreActorConfig(policy_loss=PolicyLossConfig(**(drawn | loss)), **given)


def batch():
    """A mini-batch as verl's engines have it, of two data-parallel ranks."""
    pairs, rng = sequences(COUNT, seed=3), np.random.default_rng(0)
    made = {name: values for name, values in unpadded(pairs).items() if name != "routed_experts"}
    for name, sign in (("old_log_probs", -1), ("advantages", 1), ("ref_log_prob", -1)):
        made[name] = nested([sign * rng.random(len(response)) for _, response in pairs])
    td = TensorDict(made, batch_size=COUNT)
    tu.assign_non_tensor(td, dp_size=2, batch_num_tokens=97, global_batch_size=2 * COUNT)
    return td


def gradients(config, groups):
    """Gradients of all log-probs and entropies, as verl's Megatron engine adds up its micro-batches."""
    td, random = batch(), torch.Generator().manual_seed(1)
    torch.manual_seed(0)  # of what a loss draws
    sizes, leaves = td["input_ids"].offsets().diff().tolist(), {}
    for name, sign in (("log_probs", -1), ("entropy", 1)):
        rows = [torch.rand(size, generator=random, dtype=torch.float64) for size in sizes]
        leaves[name] = [(sign * row).requires_grad_() for row in rows]
    for group in groups:
        given = {name: [rows[s] for s in group] for name, rows in leaves.items()}
        given = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in given.items()}
        loss, _ = ppo_loss(config, given, tu.index_select_tensor_dict(td, group))
        loss.backward()  # verl multiplies by the number of groups, by which Megatron divides
    return torch.cat([row.grad for rows in leaves.values() for row in rows])


def apart(config):
    found = [gradients(config, groups) for groups in GROUPINGS]
    assert found[0].abs().max() > 0
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


@pytest.mark.parametrize("mode", sorted(POLICY_LOSS_REGISTRY.keys() - REFUSED.keys()))
def test_gradients_do_not_depend_on_which_sequences_share_a_micro_batch(mode):
    for settings in (*({"loss_agg_mode": each} for each in AGGREGATED), NORM | {"loss_scale_factor": 100}):
        config = actor({"loss_mode": mode}, **settings)
        assert apart(config) < 1e-12
        assert not [text for refused, text in grouping_refusals(config) if refused]


@pytest.mark.parametrize("named", REFUSED)
def test_losses_whose_gradients_do_are_refused_by_name(named):
    """The control: the gradient is another one."""
    loss, settings = REFUSED[named]
    config = actor(loss, **settings)
    assert apart(config) > 1e-3
    (text,) = [text for refused, text in grouping_refusals(config) if refused]
    assert named in text
