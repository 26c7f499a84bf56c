"""What a record of an agent's calls trains: the loss over exactly the tokens that the engine sampled, each once."""

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.capture import read_nemo_gym, read_skycap
from foreroute.testing.models import tiny
from tests import scripted
from tests.tiers import grid


@pytest.fixture
def model(monkeypatch):
    """A model that is the scripted engine too: 4 layers, of which the first is dense, in float64."""
    built = tiny(
        vocab_size=scripted.VOCABULARY,
        num_hidden_layers=scripted.LAYERS,
        mlp_only_layers=[0],
        max_position_embeddings=128,
    ).double()

    def forward(tokens):
        routed = hf.attach(built)
        with torch.no_grad(), routed.record() as recording:
            scores = built(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        of_next = scores[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        return recording.trace().expert_ids_NLK, np.append(0.0, of_next.numpy())

    monkeypatch.setattr(scripted, "routes", lambda tokens, version: forward(tokens)[0].astype(np.int64))
    monkeypatch.setattr(scripted, "logprobs", lambda tokens, version: forward(tokens)[1])
    return built


def read(form, folder, made):
    """The rollout of these calls through a record."""
    if form == "skycap":
        graph = scripted.Skycap(made)
        return read_skycap(
            scripted.write_skycap(folder, graph.document(), graph.arrays()), model=scripted.SPEC, weight_version=0
        )
    path = scripted.write_gym(folder, [scripted.gym_entry(call, "0-0") for call in made])
    return read_nemo_gym(path, model=scripted.SPEC, weight_version=0)


@grid(("form", "seed"), [("nemo-gym", 166), ("skycap", 110)], quick=1)  # scripts with forks, retries and edits
def test_the_gradient_is_that_of_the_sampled_tokens(tmp_path, model, form, seed):
    made = scripted.script(seed)
    for call in made:
        call.has_routes = True
    rollout = read(form, tmp_path, made)
    assert rollout.generation is not None
    trained = [
        call for call in made if not any(f"call {call.name} is not trained" in each for each in rollout.left_out)
    ]
    # the oracle: each call is a forward of its own, natively routed
    for call in trained:
        scores = model(input_ids=torch.tensor([call.tokens])).logits[0].log_softmax(-1)
        first = len(call.prompt)
        scores[first - 1 : -1].gather(-1, torch.tensor(call.generated)[:, None]).sum().backward()
    expected = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()

    routed, ratios = hf.attach(model), []
    for sequence in range(len(rollout.generation)):
        one = rollout.generation.select([sequence])
        tokens = torch.tensor(one.trace.token_ids_N[None]).long()
        with routed.replay(one.trace):
            scores = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        own = scores.gather(-1, tokens[0, 1:, None])[:, 0][torch.tensor(one.targets_N)]
        own.sum().backward()
        ratios.append(own.detach() - torch.tensor(one.logprobs_R))
    ratio = torch.cat(ratios)
    assert len(ratio) == sum(len(call.generated) for call in trained)
    assert (ratio.exp() - 1 - ratio).mean() < 1e-9
    for name, gradient in expected.items():
        found = dict(model.named_parameters())[name].grad
        # norms and rotary positions of transformers are in float32 whatever the model is
        assert (found - gradient).norm() <= 1e-5 * gradient.norm(), name
