"""Routes as the code of other frameworks writes them, by their own functions: `make night PART=scores`.

The functions are taken out of the files of installed packages, which are not imported: most want an engine or a GPU.
"""

import ast
import base64
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import decode
from tests import wires

torch = pytest.importorskip("torch")
if importlib.util.find_spec("skyrl") is None:
    pytest.skip("needs the packages of make night PART=scores", allow_module_level=True)

RNG = np.random.default_rng(20)
ALL = [wires.rollout(RNG, dense=0, prompt=p, response=g) for p, g in ((4, 3), (1, 2), (5, 6))]
R, SPEC = ALL[0], ALL[0].spec
TOKENS = [r.tokens for r in ALL]
KNOWN = fr.RoutingTrace.from_sequences(SPEC, TOKENS, [r.routes_RLK for r in ALL])


def code(package, path, *names, **space):
    """Functions of one file, that may call each other."""
    [folder] = importlib.util.find_spec(package).submodule_search_locations
    tree = ast.parse(Path(folder, path).read_text())
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names}
    space |= {"torch": torch, "np": np, "math": math, "F": torch.nn.functional, "base64": base64}
    for node in found.values():
        node.decorator_list = []
        exec("from __future__ import annotations\n" + ast.unparse(node), space)
    made = [space[name] for name in names]
    return made if len(made) > 1 else made[0]


@pytest.mark.parametrize("experts", [16, 256, 300])
def test_skyrls_batch(experts):
    """0.3.0: uint8 where the largest id of the batch allows it, else int16."""
    collate = code(
        "skyrl", "train/dataset/preprocess.py", "_verify_inputs", "convert_prompts_responses_to_batch_tensors"
    )
    rollouts = [
        wires.rollout(RNG, dense=0, experts=experts, prompt=p, response=g) for p, g in ((4, 3), (1, 2), (40, 6))
    ]
    masks = [[1] * len(r.response) for r in rollouts]
    made = collate[1](
        SimpleNamespace(pad_token_id=0),
        [r.prompt for r in rollouts],
        [r.response for r in rollouts],
        [[0.0] * len(mask) for mask in masks],
        masks,
        None,
        [r.routes_RLK.tolist() for r in rollouts],
    )
    sequences, attention_mask, indices = made[0], made[1], made[-1]
    assert indices.dtype == (torch.uint8 if experts <= 256 else torch.int16)
    spec = rollouts[0].spec
    known = fr.RoutingTrace.from_sequences(spec, [r.tokens for r in rollouts], [r.routes_RLK for r in rollouts])
    batch = {"rollout_expert_indices": indices, "sequences": sequences, "attention_mask": attention_mask}
    assert decode(batch, model=spec).equals(known)
    indices[(indices == 0).flatten(2).all(-1)] = -1
    assert fr.RoutingTrace.from_padded(spec, sequences, indices, attention_mask).equals(known)


def test_verls_sequence():
    """0.9.1: int16, a row for each token, zeros at the end."""
    align = code("verl", "experimental/agent_loop/agent_loop.py", "as_dict")
    given = {"prompt_ids": R.prompt, "response_ids": R.response, "response_mask": [1] * len(R.response)}
    given |= {"routed_experts": R.routes_RLK.astype(np.uint8), "extra_fields": {}}
    made = align(SimpleNamespace(model_dump=lambda exclude_unset: given, extra_fields={}))
    batch = {"routed_experts": made["routed_experts"][None], "input_ids": torch.tensor([R.tokens])}
    assert made["routed_experts"].dtype == torch.int16
    assert decode(batch | {"attention_mask": torch.ones(1, 7, dtype=torch.int64)}, model=SPEC).equals(KNOWN.select([0]))
