"""Folders of models and tokenizers by others: nothing in them is run or unpickled, and none keeps a reader busy."""

import io
import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreroute.adapters import hf
from foreroute.adapters.hf.loading import load_local, load_pretrained
from foreroute.errors import ConfigError
from foreroute.train.prompts import Tokenizer
from tests.train.tiny_model import write_model

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    write_model(folder)
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


def changed(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def trained(folder):
    return load_pretrained(folder, experts_implementation="eager")


def examined(folder):
    return load_local(folder / "config.json")


@pytest.mark.parametrize(
    ("open_door", "model_type"),
    [*((door, "of_its_own") for door in (load_local, examined, trained, Tokenizer)), (trained, "qwen3_moe")],
)
def test_code_of_a_folder_is_not_run_even_when_stdin_says_yes(
    folder, tmp_path, monkeypatch, capsys, open_door, model_type
):
    ran = tmp_path / "ran"
    (folder / "custom_generate").mkdir()
    for name in ("configuration_evil", "modeling_evil", "tokenization_evil", "custom_generate/generate"):
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "configuration_evil.A", "AutoModelForCausalLM": "modeling_evil.B"}
    changed(folder / "config.json", model_type=model_type, auto_map=auto_map)
    auto_map = {"AutoTokenizer": ["tokenization_evil.C", "tokenization_evil.C"]}
    changed(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map=auto_map)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    if model_type == "of_its_own":
        with pytest.raises(ConfigError, match=r"code.*folder's"):
            open_door(folder)
    else:
        open_door(folder)  # transformers has this family, and uses its own
    assert not ran.exists()
    assert sys.stdin.read() == "y\n" * 9, "nobody asked"
    assert "Do you wish" not in capsys.readouterr().out


CALLED = re.compile(r"(Auto\w+\.from_(?:pretrained|config)|torch\.load|pickle\.loads?)\(((?:[^()]|\([^()]*\))*)\)")


def test_every_call_that_could_run_code_or_unpickle_says_that_it_must_not():
    """Whatever transformers' defaults are, or become."""
    found = set()
    for path in [path for folder in ("src", "examples", "experiments") for path in (ROOT / folder).rglob("*.py")]:
        for name, given in CALLED.findall(path.read_text(encoding="utf-8")):
            found.add(name)
            assert ("weights_only=True" if name == "torch.load" else "trust_remote_code=False") in given, (path, name)
            assert not name.startswith("AutoModel") or name.endswith("config") or "use_safetensors=True" in given, path
    assert {"AutoModelForCausalLM.from_config", "torch.load"} <= found


def pickled(folder, name="pytorch_model.bin"):
    torch.save(load_file(folder / "model.safetensors"), folder / name)
    (folder / "model.safetensors").unlink()


def indexed(folder, shard):
    """An index that names this file."""
    weight_map = dict.fromkeys(load_file(folder / "model.safetensors"), shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    pickled(folder, "evil.bin")


def with_adapter(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}')


def without_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


SPOILT = [
    (pickled, r"pytorch_model\.bin.*pickle.*safetensors"),
    (partial(indexed, shard="evil.bin"), r"model\.safetensors\.index\.json"),
    (partial(indexed, shard="../m.safetensors"), r"model\.safetensors\.index\.json"),
    (partial(indexed, shard=5), r"model\.safetensors\.index\.json"),
    (with_adapter, r"adapter_config\.json.*merge"),
    (without_a_weight, r"1.*missing.*another"),
]
"""What no door takes that reads weights, by words of the error. Nothing is filled at random, and nothing unpickled."""


@pytest.mark.parametrize(("spoil", "message"), SPOILT)
def test_other_weights_than_safetensors_of_the_whole_model_are_refused(folder, spoil, message):
    spoil(folder)
    for open_door in (load_local, trained):
        with pytest.raises(ConfigError, match=message):
            open_door(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"transformers_weights": "adapter_model.bin"}, "transformers_weights"),
        ({"attn_implementation": "somebody/kernel"}, "attn_implementation.*somebody/kernel"),
        ({"experts_implementation": "sonicmoe"}, "experts_implementation.*sonicmoe"),
        ({"text_config": {"_attn_implementation": {"": "flash_attention_2"}}}, "attn_implementation"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected 1024 at most"),
        ({"num_hidden_layers": 1000, "num_experts": 1000}, "1000 layers of 1000 experts; expected 262144 in all"),
        ({"hidden_size": 2**40}, r"transformers.*RuntimeError"),
    ],
)
def test_a_configuration_that_asks_for_code_or_the_impossible_is_refused(folder, values, message):
    changed(folder / "config.json", **values)
    for open_door in (load_local, examined, trained):
        with pytest.raises(ConfigError, match=message):
            open_door(folder)


def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_made(folder):
    sizes = {"hidden_size": 65536, "moe_intermediate_size": 65536, "num_experts": 512}
    changed(folder / "config.json", num_hidden_layers=64, **sizes)
    for load in (partial(examined, folder), partial(hf.build_model, "qwen3_moe", seed=0, **sizes)):
        with pytest.raises(ConfigError, match=r"[\d,]+ GB.*[\d,]+ GB"):
            load()


def test_a_fifo_in_a_folder_is_named_and_not_opened(folder):
    (folder / "chat_template.jinja").unlink()
    os.mkfifo(folder / "chat_template.jinja")
    for open_door in (load_local, trained, Tokenizer):
        with pytest.raises(ConfigError, match=r"chat_template\.jinja is a FIFO"):
            open_door(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 50_000, b'{"n": ' + b"9" * 5000 + b"}"])
def test_a_damaged_file_is_one_error(folder, content):
    for name, doors in (("config.json", (load_local, examined, trained)), ("tokenizer.json", [Tokenizer])):
        (folder / name).write_bytes(content)
        for open_door in doors:
            with pytest.raises(ConfigError, match=r"config\.json|transformers|read"):
                open_door(folder)
