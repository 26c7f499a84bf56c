"""The weights that vLLM computes with on a CPU, read back from its kernels, and those of verl's checkpoints.

vLLM packs weights for its kernels, so that what it was given and what it computes with can differ.
"""

import logging
from pathlib import Path

import torch
import torch.distributed.tensor  # whose parts of tensors `torch.load` then knows
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

# it says of every DTensor in a checkpoint that there is no process group here
logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)


def save(model, path):
    """Write all weights of vLLM's model to `path`.safetensors, by vLLM's names."""
    found = {}
    for name, module in model.named_modules():
        for parameter, stored in module._parameters.items():
            if stored is not None:
                found[f"{name}.{parameter}"] = _read(module, parameter, stored).contiguous().clone()
    save_file(found, f"{path}.tmp")
    Path(f"{path}.tmp").rename(f"{path}.safetensors")  # whole, or not there


def _read(module, parameter, stored):
    if parameter in ("w13_weight", "w2_weight"):
        return _unpacked(stored, module.quant_method.moe_kernel.fused_experts.isa)
    # an embedding looks its rows up, as they are stored
    if parameter == "weight" and hasattr(module, "cpu_linear") and type(module).__name__ != "VocabParallelEmbedding":
        sizes = ("input_size_per_partition", "input_size", "embedding_dim")
        size = next(getattr(module, name) for name in sizes if hasattr(module, name))
        # each product is a weight times one: exact in every precision
        return module.cpu_linear(torch.eye(size, dtype=module.params_dtype), module.weight, None).T
    return stored


def _unpacked(packed, isa):
    """Packing moves elements. Where to is seen from packed numbers, as digits that bfloat16 holds exactly."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers = torch.arange(packed.numel())
    came_from = torch.zeros_like(numbers)
    for power in (256**2, 256, 1):
        digits = (numbers // power % 256).to(packed.dtype).reshape(packed.shape)
        came_from += power * cpu_prepack_moe_weight(digits, isa).flatten().long()
    assert torch.equal(came_from.sort().values, numbers), "vLLM's packing does more than to move elements"
    plain = torch.empty_like(packed).flatten()
    plain[came_from] = packed.flatten()
    return plain.reshape(packed.shape)


def of_policy(folder):
    """The weights of a checkpoint of Hugging Face, by the names that the trainer's model has."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).state_dict()


def of_trainer(folder):
    """The weights of a checkpoint of verl: Megatron's are written whole, and the parts of FSDP's ranks put together."""
    whole = Path(folder) / "actor" / "model" / "huggingface"
    if whole.exists():
        return of_policy(whole)
    files = sorted(Path(folder).glob("actor/model_world_size_*_rank_*.pt"))
    parts = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    return {name: _whole([part[name] for part in parts]) for name in parts[0]}


def _whole(parts):
    if not hasattr(parts[0], "placements"):
        return parts[0]
    [placement] = parts[0].placements
    return (
        torch.cat([part.to_local() for part in parts], placement.dim) if placement.is_shard() else parts[0].to_local()
    )


def differing(trainer, file, config):
    """Names of the trainer's tensors that the engine has not, bit by bit in its own precision.

    Args:
        trainer: of `of_policy` or `of_trainer`.
        file: that `save` wrote.
        config: of the model.
    """
    engine = dict(_split(load_file(file), config))
    if unknown := engine.keys() - trainer.keys():
        raise KeyError(f"the trainer has no {sorted(unknown)}")
    return [name for name, weight in trainer.items() if not _same(weight, engine.get(name))]


def _same(weight, held):
    return held is not None and held.shape == weight.shape and torch.equal(weight.to(held.dtype), held)


def _split(engine, config):
    """By the trainer's names: vLLM joins queries with keys and values, and gates with what they gate."""
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    for name, weight in engine.items():
        if name.endswith("qkv_proj.weight"):
            for part, rows in zip("qkv", weight.split([queries, keys, keys]), strict=True):
                yield name.replace("qkv_proj", f"{part}_proj"), rows
        elif name.endswith("gate_up_proj.weight"):
            for part, rows in zip(("gate", "up"), weight.chunk(2), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj"), rows
        elif name.endswith(("w13_weight", "w2_weight")):
            trunk, _, stacked = name.partition(".experts.")
            yield f"{trunk}.experts.{'gate_up_proj' if 'w13' in stacked else 'down_proj'}", weight
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            yield name, weight[: config.vocab_size]  # vLLM pads the vocabulary
        else:
            yield name, weight
