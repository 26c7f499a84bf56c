"""The patch for NeMo Automodel's recipe, applied to the released package: it trains on the routes in its batches."""

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

if "FOREROUTE_PATCHES" not in os.environ:
    pytest.skip("Automodel has an environment of its own: run `make night PART=patches`", allow_module_level=True)
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # which takes half a minute for its experts


from tests.patches import cuda_on_cpu
from tests.patches.forced import require_followed, routed_by, tiny
from tests.trainers.given_experts import Forward, differing

PATCH = "automodel/upstream/rollout_replay.patch"
STEPS, LENGTHS = 4, [12, 9, 11, 7]  # of four sequences a step, in two micro-batches
ROWS = 3 * (sum(LENGTHS) - len(LENGTHS))


@pytest.fixture(scope="module")
def automodel(tmp_path_factory):
    """The package as it was released, and the patch applied."""
    folder = tmp_path_factory.mktemp("patched")
    cuda_on_cpu.patched("nemo_automodel", PATCH, folder)
    from nemo_automodel.recipes.llm import train_ft

    assert Path(train_ft.__file__).is_relative_to(folder)
    import_module("nemo_automodel.components.models.qwen3_moe.model")
    cuda_on_cpu.names_no_device("nemo_automodel")
    return train_ft


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny()
    model.config.dtype = "float32"
    model.save_pretrained(folder)
    return folder


class Rollouts(torch.utils.data.Dataset):
    """Sequences of random tokens, and the routes of an engine a little off the first policy."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        lengths = LENGTHS * STEPS
        self.tokens = [torch.randint(2, 64, (length,), generator=generator) for length in lengths]
        routes = routed_by(tiny().bfloat16(), [tokens.tolist() for tokens in self.tokens])
        # none of the last token, for which engines leave zeros
        self.routes = [torch.cat([ids, torch.zeros(1, 3, 2, dtype=ids.dtype)]) for ids in routes]
        self.known = {tuple(tokens.tolist()): ids.numpy() for tokens, ids in zip(self.tokens, routes, strict=True)}

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, place):
        return {"input_ids": self.tokens[place], "routed_experts": self.routes[place]}


def collate(examples):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([each["input_ids"] for each in examples], batch_first=True)
    mask = pad([torch.ones_like(each["input_ids"]) for each in examples], batch_first=True)
    labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].masked_fill(mask.roll(-1, 1) == 0, -100)
    labels[:, -1] = -100
    routes = pad([each["routed_experts"] for each in examples], batch_first=True)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "routed_experts": routes.byte()}


def recipe(automodel, checkpoint, tmp_path, rollouts, replay):
    from nemo_automodel.components.config.loader import ConfigNode

    sys.modules["rollouts"] = module = type(sys)("rollouts")
    module.make, module.collate = (lambda **_: rollouts), collate
    parts = dict.fromkeys(("linear", "rms_norm", "experts", "dispatcher"), "torch")
    backend = {
        "_target_": "nemo_automodel.components.models.common.BackendConfig",
        "attn": "sdpa",
        "rope_fusion": False,
    }
    loader = {"_target_": "torchdata.stateful_dataloader.StatefulDataLoader", "collate_fn": "rollouts.collate"}
    config = {
        "dist_env": {"backend": "gloo"},
        "step_scheduler": {"global_batch_size": 4, "local_batch_size": 2, "num_epochs": 1, "max_steps": STEPS},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": str(checkpoint),
            "torch_dtype": "float32",
            "backend": backend | parts,
        },
        "distributed": {"strategy": "fsdp2", "dp_size": 1, "activation_checkpointing": False},
        "checkpoint": {"enabled": False, "checkpoint_dir": str(tmp_path)},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {"_target_": "rollouts.make"},
        "dataloader": loader | {"shuffle": False},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3, "foreach": False},
        "rollout_replay": replay,
    }
    made = automodel.TrainFinetuneRecipeForNextTokenPrediction(ConfigNode(config))
    made.setup()
    return made


def trained(made):
    """What experts were given, and the metrics."""
    [model] = made.model_parts
    forwards, metrics = [], []

    def begin(_, args, kwargs):
        forwards.append(Forward(kwargs["input_ids"], kwargs["attention_mask"]))

    model.register_forward_pre_hook(begin, with_kwargs=True)
    experts = [m for m in model.modules() if type(m).__name__ == "GroupedExperts"]
    for layer, module in enumerate(experts):

        def note(_, args, layer=layer):
            forwards[-1].calls.append((layer, args[3].detach().numpy().copy()))

        module.register_forward_pre_hook(note)
    made.log_train_metrics = lambda sample: metrics.append(sample.metrics)
    made.run_train_validation_loop()
    return forwards, metrics


@pytest.mark.parametrize("replay", [True, False])
def test_four_steps_on_the_routes_of_the_rollout(replay, automodel, checkpoint, tmp_path):
    rollouts = Rollouts()
    made = recipe(automodel, checkpoint, tmp_path, rollouts, replay)
    forwards, metrics = trained(made)
    assert len(metrics) == STEPS
    disagreements = [each.get("rollout_replay/native_disagreement") for each in metrics]
    for disagreement in disagreements:
        require_followed(differing(forwards, rollouts.known), STEPS * ROWS, replay, disagreement)
