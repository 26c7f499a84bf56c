"""The patch of examples/megatron on a stand-in of Megatron-LM's loop: the policy runs what rollouts brought."""

import copy
import re
import sys
import types
from unittest import mock

import numpy as np
import pytest
import torch

from examples.megatron import rollout_routes
from tests.adapters.megatron.forked_ranks import HERE, ROOT, on_ranks
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.model_chunks import EXPERTS, TOP_K, VOCABULARY, build, initialize
from tests.adapters.megatron.training_step import Dispatched

PAD, WIDTH, LAYERS = 0, 24, 2
LENGTHS = (11, 5, 9, 16)


@on_ranks(1)
def test_all_forwards_but_those_of_the_reference_replay_what_rollouts_bring():
    for bins in (None, [(1, 0), (2,), (3,)]):
        loop, model = patched(), a_model()
        seen, rollouts = steps(loop, model, bins)
        order = [0, 1, 2, 3] if bins is None else [1, 0, 2, 3]
        batches = 5 if bins is None else len(bins)  # one of them is inert
        for layer in range(LAYERS):
            maps = [call[1] for call in seen.calls[layer]]
            assert len(maps) == 4 * batches
            told = maps_of(rollouts, order, layer)
            update = maps[2 * batches :]  # each forward has its recomputation behind it
            for of_pass, follows in (
                (maps[:batches], True),
                (maps[batches : 2 * batches], False),
                (update[::2], True),
                (update[1::2], True),
            ):
                found = [
                    np.array_equal(ran_RE[: len(told_RE)], told_RE) for ran_RE, told_RE in pairs(of_pass, bins, told)
                ]
                assert found == [follows] * 4, (bins, layer, follows, found)


@pytest.mark.slow
@on_ranks(1)
def test_a_sequence_without_routes_ends_the_run():
    loop, model = patched(), a_model()
    rollouts = sampled(loop)
    [one] = rollouts[0][0].trajectory
    loop.get_rl_runtime_state().routes.remember(model, rollouts[0], PAD)
    tokens = torch.tensor([one + [PAD] * (WIDTH - len(one))])
    loop.get_logprobs(model, tokens, torch.arange(WIDTH)[None])
    with pytest.raises(KeyError):
        loop.get_logprobs(model, tokens.roll(1, 1), torch.arange(WIDTH)[None])


def patched():
    page = (ROOT / "examples" / "megatron" / "README.md").read_text()
    [diff] = re.findall(r"^```diff\n([\s\S]*?)^```", page, re.MULTILINE)
    loop = types.ModuleType("rl_loop")
    text = applied(diff, (HERE / "rl_loop.py").read_text())
    with mock.patch.dict(sys.modules, {"megatron.rl.rollout_routes": rollout_routes}):
        exec(compile(text, "rl_loop", "exec"), vars(loop))
    return loop


def applied(diff, text):
    """Every hunk has one place, whatever its file."""
    for hunk in re.split(r"^(?:@@|---|\+\+\+).*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        if hunk:
            assert text.count(before) == 1, f"{text.count(before)} places for\n{hunk}"
            text = text.replace(before, after)
    return text


def a_model():
    initialize(Cell())
    [model] = build(Cell(layers=LAYERS, recompute="uniform", packed=True))
    return model


def sampled(loop):
    rng = np.random.default_rng(0)

    def one(number, length):
        routes = rng.permuted(np.tile(np.arange(EXPERTS), (length - 1, LAYERS, 1)), axis=-1)[..., :TOP_K]
        tokens = rng.integers(1, VOCABULARY, length).tolist()
        choice = types.SimpleNamespace(token_ids=tokens, prompt_length=2, moe_topk_indices=routes.tolist())
        answer = types.SimpleNamespace(choices=[choice], id=str(number))
        return loop.rollout_from_episode([loop.base_generate(answer)])

    rollouts = [one(number, length) for number, length in enumerate(LENGTHS)]
    return [rollouts[:2], rollouts[2:]]


def steps(loop, model, bins):
    rollouts = sampled(loop)
    reference = copy.deepcopy(model.state_dict())
    with Dispatched([model]).watch() as seen:
        data, *_ = loop.prepare_data_for_update(
            [model], reference, rollouts, types.SimpleNamespace(pad=PAD), WIDTH, bins
        )
        loop.train_step(model, data, WIDTH)
    return seen, rollouts


def pairs(maps, bins, told):
    """Maps [R, E] of each sequence, in order, as they ran, with padding behind, and as they were told."""
    if bins is None:
        ran = maps[:4]  # and the inert row
    else:
        slots = [[-(-LENGTHS[number] // 4) * 4 for number in of_bin] for of_bin in bins]
        cuts = [np.split(map_RE, np.cumsum(of_bin))[:-1] for map_RE, of_bin in zip(maps, slots, strict=True)]
        ran = [part for parts in cuts for part in parts]
    return zip(ran, told, strict=True)


def maps_of(rollouts, order, layer):
    """bool [T - 1, E] of each rollout, as its engine said."""
    flat = [rollout for group in rollouts for rollout in group]
    told = [np.array(flat[number].routes[-1])[:, layer] for number in order]
    maps = [np.zeros((len(ids_TK), EXPERTS), bool) for ids_TK in told]
    for map_TE, ids_TK in zip(maps, told, strict=True):
        np.put_along_axis(map_TE, ids_TK, True, 1)
    return maps
