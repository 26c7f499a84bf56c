"""What properties of sessions are asked of: a small model, what it is fed, and what its experts are given."""

from functools import cached_property
from typing import NamedTuple

import numpy as np
import pytest
import torch

from foreroute import RoutingTrace


class Batch(NamedTuple):
    """Sequences, padded on the right with 0."""

    ids_BT: torch.Tensor  # int64
    lengths: tuple

    @property
    def real_BT(self):
        return torch.arange(self.ids_BT.shape[1]) < torch.tensor(self.lengths)[:, None]

    @property
    def sequences(self):
        """The tokens of each, without padding."""
        return [row[:length].numpy() for row, length in zip(self.ids_BT, self.lengths, strict=True)]

    def select(self, *numbers):
        """These sequences, as wide as before."""
        return Batch(self.ids_BT[list(numbers)], tuple(self.lengths[n] for n in numbers))


class Given(NamedTuple):
    """What the experts of a layer were given once."""

    column: int  # the layer, as a trace numbers it
    map_BTE: np.ndarray  # bool, the experts of each token
    weights_BTE: np.ndarray  # float32, what their outputs are summed with; 0 elsewhere


def router_paths(routed):
    """Where the routers of an attached model are, inside the chunks of this rank, in layer order."""
    return [router.path for hooks in routed.chunks for router in hooks.routers]


class Subject:
    """A model in training mode, of three routed layers and eight experts, which is attached when its sessions are used.

    Every framework says in a class of its own:

    - `gates` and `recomputations`: names of all kinds of gate and all ways of recomputing activations. The usual gate
      and "none" are first.
    - `built(gate, recompute, seed=)`: one of them, always the same; `attach(model)`: the adapter's own door.
    - `layers`: the list of decoder layers; `overridden`: pairs of a module and a method that sessions put stand-ins on.
    - `run(batch)`: log-probabilities [B, T - 1] of the next tokens, from one forward; those at padding mean nothing.
    - `given()`: a context with a list of `Given`, which grows with every forward and recomputation of a layer.
    - `scores()`: a context with a list of what each router selects by, float64 [B, T, E], by its definition written
      down anew; closed groups are left out by -inf, or by 0 where the family does that. `selects_by_logits` says
      whether these are logits, and not probabilities.
    - `bypassed(block)`, `run_twice(block)`: contexts in which a block does not run its router, or twice.
    - `wrong_calls(batch)`: forwards with an argument of a wrong kind or value, {words of the error: function}.
    """

    def __init__(self, model):
        self.model = model

    @classmethod
    def with_statistics(cls):
        """One whose routers feed all statistics that the framework keeps of them."""
        return cls.built()

    @cached_property
    def routed(self):
        return self.attach(self.model)

    @property
    def routers(self):
        """In layer order."""
        return [self.model.get_submodule(path) for path in router_paths(self.routed)]

    @property
    def blocks(self):
        """The modules that routers stand in, in layer order."""
        return [self.model.get_submodule(path.rpartition(".")[0]) for path in router_paths(self.routed)]

    def log_probs(self, batch):
        """[tokens], of every next token that is not padding."""
        return self.run(batch)[batch.real_BT[:, 1:]]

    def loss(self, batch):
        """The mean, negative."""
        return -self.log_probs(batch).mean()

    def gradients(self):
        """By name, of the parameters that have one."""
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}


def batch_of(*lengths, seed=0):
    """Padded tokens of sequences of these lengths, 9, 6 and 4 by default."""
    lengths = lengths or (9, 6, 4)
    ids_BT = torch.randint(1, 50, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    batch = Batch(ids_BT, lengths)
    return batch._replace(ids_BT=torch.where(batch.real_BT, ids_BT, 0))


def foreign(spec, batch, seed=1, absent=()):
    """Routes that no router chose, with none for the rows (sequence, position) that are absent; of version 1."""
    rng = np.random.default_rng(seed)
    routes = [random_ids(rng, spec, length) for length in batch.lengths]
    valid = [np.array([(s, p) not in absent for p in range(n)]) for s, n in enumerate(batch.lengths)]
    versions = [np.full(n, 1) for n in batch.lengths]
    return RoutingTrace.from_rows(spec, batch.sequences, routes, valid=valid, weight_versions=versions)


def prepared(framework, *variant, **options):
    """One of its models, and routes of `batch_of()` that it would not take."""
    on = framework.built(*variant, **options)
    return on, foreign(on.routed.spec, batch_of())


def random_ids(rng, spec, num_rows, favour=0.0):
    """[rows, L, K], -1 behind the picks of a layer; first experts are favoured, as by trained routers."""
    scores = rng.random((num_rows, spec.num_layers, spec.num_experts)) - np.linspace(favour, 0, spec.num_experts)
    for layer, (num_experts, _) in enumerate(spec.sizes_L):
        scores[:, layer, num_experts:] = 2  # sorted behind all experts that there are
    return np.where(spec.is_pick_LK, np.argsort(scores, axis=-1)[..., : spec.top_k], -1)


def recorded(on, batch, **options):
    """What a model picks by itself."""
    with on.routed.record(**options) as recording, torch.no_grad():
        on.run(batch)
    return recording.trace()


def replayed(on, routes, batch, **options):
    """The loss of one forward on these routes."""
    with on.routed.replay(routes, **options):
        return on.loss(batch)


def step(on, routes, batch, **options):
    """Loss and gradients of one forward and backward on these routes, or without replay where they are None."""
    on.model.zero_grad(set_to_none=True)
    loss = on.loss(batch) if routes is None else replayed(on, routes, batch, **options)
    loss.backward()
    return loss.detach(), on.gradients()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def map_of(trace, batch, column):
    """Bool [B, T, E] of what the trace says of a layer: no expert in padding, and where there is no route."""
    map_BTE = np.zeros((*batch.ids_BT.shape, trace.spec.num_experts), bool)
    for s, length in enumerate(batch.lengths):
        rows = slice(trace.offsets[s], trace.offsets[s + 1])
        map_TE = np.zeros((length, trace.spec.num_experts), bool)
        picks_TK = trace.expert_ids_NLK[rows, column, : trace.spec.sizes_L[column][1]].astype(int)
        np.put_along_axis(map_TE, picks_TK, True, axis=-1)
        map_BTE[s, :length] = map_TE & trace.valid_N[rows, None]
    return map_BTE


def require_followed(given, trace, batch):
    """Every layer's experts were given the routes of the trace, in a forward and whatever recomputations ran."""
    assert {each.column for each in given} == set(range(trace.spec.num_layers))
    for each in given:
        wanted = map_of(trace, batch, each.column)
        routed = wanted.any(-1)
        assert np.array_equal(each.map_BTE[routed], wanted[routed]), f"layer {each.column} did not follow"
        assert (each.map_BTE.sum(-1) == trace.spec.sizes_L[each.column][1]).all()


def refuses(error, said, call):
    """`call()` raises this error, with words that match where some are said."""
    with pytest.raises(error, match=said):
        call()


def entering(make, *args, **options):
    return lambda: make(*args, **options).__enter__()
