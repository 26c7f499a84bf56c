"""What is checked on the tiny model of every family. A check returns nothing, or why it does not apply; or it fails."""

import json
import re
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from foreroute.adapters import hf
from foreroute.adapters.hf.attaching import about_packed
from foreroute.adapters.hf.without_weights import structure_of
from foreroute.adapters.versions import PEERS
from foreroute.core.hooks import overridden
from foreroute.errors import ConfigError
from foreroute.replay import ReplayCounts
from foreroute.trace import LayerKind
from tests.adapters.hf.families import build, modelling_file
from tests.adapters.hf.family_gates import GATES, Gate
from tests.adapters.hf.model_runs import checkpointed_by_library, gradients, random_routes
from tests.replay.session_subject import router_paths, same

TOKENS = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}


def record(name):
    """What is recorded is what the experts are given. No router is taken for a packed one."""
    model, routed = shared(name)
    assert not about_packed(routed.routers)
    with routed.record() as recording, watching(name, routed) as calls:
        run(model)
    require_given_to_experts(recording.trace(), calls)


def native(name):
    """Replaying its own routes changes no bit of outputs and gradients."""
    require_bit_equal(build(name), *shared(name))


def foreign(name):
    """Experts are given exactly the ids of routes that the model would not take, and the count of others is 0.

    Gate weights follow the formula of the family, those of an untouched router at its own picks and ours at the
    replayed; so do the gradients of every router.
    """
    model, routed = shared(name)
    with routed.record() as recording, watching(name, routed) as untouched:
        run(model)
    trace, counts = foreign_routes(routed), ReplayCounts()
    with routed.listening(counts), routed.replay(trace), watching(name, routed) as replayed:
        loss = run(model)
    require_given_to_experts(trace, replayed)
    assert [int(counts.sums[each]) for each in ("rows", "differing_decisions")] == [trace.num_rows, 0]
    for routes, calls in ((recording.trace(), untouched), (trace, replayed)):
        for layer, call in enumerate(calls):
            torch.testing.assert_close(
                call.weights.double(), call.expected(ids_of(routes, layer)), rtol=5e-6, atol=1e-7
            )
    if is_newest():
        for call, other in zip(untouched, replayed, strict=True):
            require_selected(call, other)
    require_gradients(trace, replayed)
    loss.backward()
    for path in router_paths(routed):
        assert any(p.grad is not None and p.grad.any() for p in model.get_submodule(path).parameters()), path


def is_newest():
    """Whether transformers is of the tested release: older ones hand on other logits."""
    return transformers.__version__ == PEERS["transformers"].newest


def require_selected(untouched, replayed):
    """`select_at` gives the weights of a router bit for bit, at its own ids and at replayed ones, and its picks."""
    if untouched.gate.weights is not None:  # which is a rule of its own
        return
    for call in (untouched, replayed):
        weights, ids = call.gate.selected(call.logits, call.ids)
        assert torch.equal(ids, call.ids)
        assert torch.equal(weights, call.weights)
    if type(untouched.router).__name__.endswith("HashRouter"):
        return
    absent = torch.full_like(untouched.ids, -1)
    weights, ids = untouched.gate.selected(untouched.logits, absent, **native_rule(untouched))
    order, of_router = ids.argsort(-1), untouched.ids.argsort(-1)  # routers order picks in ways of their own
    assert torch.equal(ids.gather(-1, order), untouched.ids.gather(-1, of_router))
    torch.testing.assert_close(weights.gather(-1, order), untouched.weights.gather(-1, of_router), rtol=2e-7, atol=0)


def native_rule(call):
    """The bias and the groups by which a router selects."""
    owners, names = (call.block, *call.router.modules()), ("e_score_correction_bias", "expert_bias")
    biases = [getattr(owner, name).detach().flatten() for owner in owners for name in names if hasattr(owner, name)]
    groups = None
    if getattr(call.router, "num_group", 1) > 1:
        counted = 1 if call.gate == Gate() else 2  # of DeepSeek-V2's kind
        groups = call.router.num_group, call.router.topk_group, counted
    return {"bias": biases[0] if biases else None, "groups": groups}


def require_gradients(trace, calls):
    """The gradient of a router is that of the formula at the replayed ids, and that of `select_at` to the bit."""
    generator = torch.Generator().manual_seed(1)
    for layer, call in enumerate(calls):
        direction = torch.rand(call.weights.shape, generator=generator)
        expected = (call.expected(ids_of(trace, layer)) * direction).sum()
        parameters = [p for p in call.router.parameters() if p.requires_grad]
        for ours, theirs in zip(
            torch.autograd.grad((call.weights * direction).sum(), parameters, retain_graph=True, allow_unused=True),
            torch.autograd.grad(expected, parameters, retain_graph=True, allow_unused=True),
            strict=True,
        ):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        if is_newest() and call.gate.weights is None and call.logits.requires_grad:
            selected, _ = call.gate.selected(call.logits, call.ids)
            [by_router], [by_door] = (
                torch.autograd.grad((given * direction).sum(), call.logits, retain_graph=True)
                for given in (call.weights, selected)
            )
            assert torch.equal(by_router, by_door)


def checkpointing(name):
    """Both kinds, with the backward outside of the session, change no gradient bit under foreign routes."""
    try:
        checkpointed_by_library(build(name))
    except ValueError:
        return "upstream has no activation checkpointing"
    plain, why_not = trained_gradients(*shared(name)), None
    for use_reentrant in (False, True):
        try:
            ours = checkpointed_gradients(name, use_reentrant)
        except RuntimeError as error:
            if not use_reentrant:
                raise
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                checkpointed_gradients(name, use_reentrant, replayed=False)
            why_not = "upstream's reentrant kind fails"
            continue
        assert plain.keys() == ours.keys()
        differing = {key for key in plain if not torch.equal(ours[key], plain[key])}
        if differing:  # a sum of several contributions may be taken in another order, as it is without replay
            untouched = checkpointed_gradients(name, None, replayed=False)
            native = checkpointed_gradients(name, use_reentrant, replayed=False)
            assert differing <= {key for key in untouched if not torch.equal(native[key], untouched[key])}
            for key in differing:
                torch.testing.assert_close(ours[key], plain[key], rtol=1e-5, atol=1e-7)
    return why_not


def backends(name):
    """Grouped and batched expert backends: own routes bit-equal, foreign routes as the eager backend has them."""
    if "use_experts_implementation" not in modelling_file(name).read_text():
        return "upstream has one backend"
    _, eager = shared(name)
    with eager.replay(foreign_routes(eager)), torch.no_grad():
        expected = run(eager.model)
    for experts in ("grouped_mm", "batched_mm"):
        model, routed = attached(name, experts=experts)
        require_bit_equal(build(name, experts=experts), model, routed)
        with routed.replay(foreign_routes(routed)), torch.no_grad():
            torch.testing.assert_close(run(model), expected, rtol=1e-3, atol=1e-3)
    return None


def configuration(name):
    """The configuration tells, without weights, the layers and the indexers that the attached model has."""
    model, routed = shared(name)
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), model)
        if name == "jetmoe":
            with pytest.raises(ConfigError, match=r"config\.json: transformers .*split_with_sizes.*pass a trace"):
                structure_of(path)
            return "its experts are split by counts of rows, which are values"
        require_told(path, model, routed)
    return None


CHECKS = [record, native, foreign, checkpointing, backends, configuration]


class Call:
    """One call of a selecting function: weights [R, K] in the graph, int64 ids [R, K], and those that experts got."""

    def __init__(self, name, router, block, top_k, args, output, *, takes_logits):
        self.gate, self.router, self.block, self.hidden = GATES[name], router, block, args[0]
        self.logits = args[0] if takes_logits else output[self.gate.logits]
        self.weights, self.ids = self.gate.read(output, top_k)
        self.to_experts = None

    def expected(self, ids):
        return self.gate.expected(self.router, self.hidden, self.logits, ids)


@contextmanager
def watching(name, routed):
    """A `Call` for every router of a forward, in the order in which they run."""
    calls = []

    def note(router, block, takes_logits, selecting, *args, **kwargs):
        output = selecting(*args, **kwargs)
        top_k = routed.spec.sizes_L[len(calls) % routed.spec.num_layers][1]
        calls.append(Call(name, router, block, top_k, args, output, takes_logits=takes_logits))
        return output

    def note_experts(module, args):
        if len(args) > 1 and isinstance(args[1], torch.Tensor) and not args[1].is_floating_point():
            calls[-1].to_experts = args[1]

    with ExitStack() as stack:
        for path in router_paths(routed):
            router, block = map(routed.model.get_submodule, (path, path.rpartition(".")[0]))
            by_block = hasattr(block, "route_tokens_to_experts")  # dbrx, and more families in older releases
            selecting = (block, "route_tokens_to_experts") if by_block else (router, "forward")
            stack.enter_context(overridden(*selecting, partial(note, router, block, by_block)))
        for module in routed.model.modules():
            if type(module).__name__.endswith("Experts"):
                stack.callback(module.register_forward_pre_hook(note_experts).remove)
        yield calls


def require_given_to_experts(trace, calls):
    assert len(calls) == trace.spec.num_layers
    for layer, call in enumerate(calls):
        expected = ids_of(trace, layer)
        if type(call.router).__name__ == "ZayaRouter":  # its last class is no expert, and handed on as 0 of weight 0
            expected = expected.masked_fill(expected == call.router.num_experts, 0)
        if call.to_experts is not None:
            assert torch.equal(call.to_experts, expected)
        else:  # a set: in order of experts
            assert torch.equal(call.ids.sort(-1).values, expected.sort(-1).values)


def run(model):
    """A scalar in which every element of the first output counts."""
    torch.manual_seed(0)
    output = model(input_ids=TOKENS, use_cache=False)[0]
    return (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(1))).mean()


def require_bit_equal(untouched, model, routed, loss_of=run, **options):
    """A model under its own routes has the loss and the gradients of one that is not replayed. Returns the session."""
    with routed.record() as recording, torch.no_grad():
        loss_of(model)
    expected = loss_of(untouched)
    expected.backward()
    with routed.replay(recording.trace(), **options) as session:
        loss = loss_of(model)
    loss.backward()
    assert torch.equal(loss, expected)
    assert same(gradients(model), gradients(untouched))
    return session


def written(folder, model):
    """The config.json of a model, in a folder."""
    config = json.loads(model.config.to_json_string(use_diff=True))
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return path


def require_told(path, model, routed):
    spec, indexers, config = structure_of(path)
    assert (spec, indexers) == (routed.spec, routed.indexers)
    assert config["vocab_size"] == model.config.vocab_size


def checkpointed_gradients(name, use_reentrant, *, replayed=True):
    model = build(name)
    routed = hf.attach(model) if replayed else None
    if use_reentrant is not None:
        checkpointed_by_library(model, {"use_reentrant": use_reentrant})
    return trained_gradients(model, routed)


def trained_gradients(model, routed):
    """In train mode, under foreign routes where there is a `routed`."""
    model.train()
    with routed.replay(foreign_routes(routed)) if routed else nullcontext():
        loss = run(model)
    loss.backward()
    model.eval()
    return gradients(model)


def attached(name, **build_options):
    model = build(name, **build_options)
    return model, hf.attach(model)


def shared(name):
    """One attached model for all checks that leave it as it is. The checks of a family run one after the other."""
    model, routed = attached_once(name)
    model.zero_grad()
    return model, routed


attached_once = lru_cache(maxsize=1)(attached)


def foreign_routes(routed, batch=BATCH, seed=1):
    """Random routes; a layer that looks its experts up keeps its own."""
    trace = random_routes(routed.spec, batch, seed)
    looked_up = [layer for layer, each in enumerate(routed.spec.layers) if each.kind is LayerKind.HASH]
    if looked_up:
        with routed.record() as recording, torch.no_grad():
            routed.model(**{name: each.to(routed.model.device) for name, each in batch.items()}, use_cache=False)
        ids = trace.expert_ids_NLK.copy()
        ids[:, looked_up] = recording.trace().expert_ids_NLK[:, looked_up]
        trace = replace(trace, expert_ids_NLK=ids)
    return trace


def ids_of(trace, layer):
    return torch.from_numpy(trace.expert_ids_NLK[:, layer, : trace.spec.picks_L[layer]].astype(np.int64))
