"""Models of transformers, as the properties of sessions take them."""

from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from foreroute.adapters import hf
from foreroute.testing.models import FAMILIES, GROUPED, tiny
from tests.adapters.hf.families import lacks
from tests.adapters.hf.model_runs import checkpoint_by_hand, checkpointed_by_library, enable_checkpointing, uneven
from tests.replay.session_subject import Given, Subject, router_paths


def by(checkpointing, use_reentrant):
    return lambda on: checkpointing(on.model, use_reentrant)


def pairs_by_hand(on, use_reentrant):
    """A checkpoint around two layers, each of which has one of its own."""
    checkpoint_by_hand(on.model, use_reentrant)
    first, second = on.layers[:2]
    run, then = first.forward, second.forward
    first.forward = lambda h, **kw: checkpoint(lambda x: then(run(x, **kw), **kw), h, use_reentrant=use_reentrant)
    second.forward = lambda h, **kw: h


def selective(on):
    """Kept is what no router computes, whose weights change in between, and nobody writes to."""
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.silu.default])
    checkpointed_by_library(on.model, {"use_reentrant": False, "context_fn": kept})


FORMS = {"reentrant": True, "non-reentrant": False}
RECOMPUTATIONS = {
    "none": lambda on: None,
    **{name: by(enable_checkpointing, form) for name, form in FORMS.items()},
    **{f"layers by hand, {name}": by(checkpoint_by_hand, form) for name, form in FORMS.items()},
    **{f"pairs by hand, {name}": partial(pairs_by_hand, use_reentrant=form) for name, form in FORMS.items()},
    "selective": selective,
}


class HuggingFaceSubject(Subject):
    """One family for each kind of gate that the installed transformers has, and one of other sizes in each layer."""

    gates = (*(name for name in (*FAMILIES, *GROUPED) if lacks(name) is None), "uneven layers")
    recomputations = tuple(RECOMPUTATIONS)
    family = "qwen3_moe"

    @classmethod
    def built(cls, gate=None, recompute="none", *, seed=0):
        is_uneven, gate = gate == "uneven layers", gate or cls.gates[0]
        on = cls((uneven(seed=seed) if is_uneven else tiny(gate, seed=seed)).train())
        on.family = "qwen3_moe" if is_uneven else gate
        RECOMPUTATIONS[recompute](on)
        return on

    @classmethod
    def attach(cls, model):
        return hf.attach(model)

    @property
    def layers(self):
        return self.model.model.layers

    @property
    def overridden(self):
        return [(part, "forward") for part in (self.model, self.model.model, self.routers[1])]

    def run(self, batch):
        return self._call(batch, input_ids=batch.ids_BT, attention_mask=batch.real_BT.long())

    def _call(self, batch, **arguments):
        self._shape = batch.ids_BT.shape
        logits = self.model(**arguments, use_cache=False).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, batch.ids_BT[:, 1:, None])[..., 0]

    @contextmanager
    def given(self):
        given = []
        columns = {f"{path.rpartition('.')[0]}.experts": n for n, path in enumerate(router_paths(self.routed))}

        def note(module, args, column):
            map_RE = torch.zeros(len(args[1]), self.routed.spec.num_experts, dtype=torch.bool)
            weights_RE = torch.zeros(map_RE.shape).scatter(1, args[1], args[2].detach().float())
            shape = (*self._shape, -1)
            map_RE.scatter_(1, args[1], True)
            given.append(Given(column, map_RE.view(shape).numpy(), weights_RE.view(shape).numpy()))

        with ExitStack() as stack:
            for path, column in columns.items():
                hook = partial(note, column=column)
                stack.enter_context(self.model.get_submodule(path).register_forward_pre_hook(hook))
            yield given

    @contextmanager
    def scores(self):
        seen = []
        note = lambda router, args, out: seen.append(selected_by(self.family, router, out).view(*self._shape, -1))  # noqa: E731
        with ExitStack() as stack:
            for router in self.routers:
                stack.enter_context(router.register_forward_hook(note))
            yield seen

    @property
    def selects_by_logits(self):
        return self.family == "gpt_oss"

    @contextmanager
    def bypassed(self, block):
        block.forward = lambda hidden: hidden
        yield
        del block.forward

    @contextmanager
    def run_twice(self, block):
        run = block.forward
        block.forward = lambda hidden: run(hidden) + run(hidden)
        yield
        del block.forward

    def wrong_calls(self, batch):
        ids, mask = batch.ids_BT, batch.real_BT.long()
        changes = {
            r"attention_mask holds 0\.5": {"attention_mask": mask * 0.5},
            "attention_mask holds nan": {"attention_mask": mask * float("nan")},
            "attention_mask is a list": {"attention_mask": mask.tolist()},
            r"input_ids are float32 of shape \(3, 9\)": {"input_ids": ids.float()},
            r"input_ids are int64 of shape \(9,\)": {"input_ids": ids[0]},
            r"(cache|past_key_values) is a str": {"past_key_values": "cache"},
            "cu_seq_lens_q is a list": {"cu_seq_lens_q": [0, 27]},
            r"cu_seq_lens_q are int64 of shape \(1, 2\)": {"cu_seq_lens_q": torch.tensor([[0, 27]])},
            r"attention_mask is \(3, 8\)": {"attention_mask": mask[:, 1:]},
            r"attention_mask is .*\(3, 1, 9, 9\)": {"attention_mask": torch.zeros(3, 1, 9, 9)},
            "the forward got no input_ids": {"input_ids": None, "inputs_embeds": torch.zeros(3, 9, 32)},
        }
        good = {"input_ids": ids, "attention_mask": mask}
        return {said: partial(self._call, batch, **{**good, **change}) for said, change in changes.items()}


def selected_by(family, router, output):
    """[R, E] in float64, what a router selects by, computed from its logits by the family's definition."""
    logits = (output if isinstance(output, torch.Tensor) else output[0]).detach().double()
    if family == "gpt_oss":
        return logits
    if family in {"qwen3_moe", "mixtral", "olmoe"}:  # transformers 5.3 hands on the probabilities
        return logits if torch.allclose(logits.sum(-1), logits.new_ones(())) else logits.softmax(-1)
    if family == "deepseek_v3":
        scores = logits.sigmoid() + router.e_score_correction_bias
        best = scores.view(len(scores), 4, 2).topk(2, dim=-1).values.sum(-1).topk(2, dim=-1).indices
    else:
        scores = logits.softmax(-1)
        best = scores.view(len(scores), 4, 2).amax(-1).topk(2, dim=-1).indices
    allowed = torch.zeros(len(scores), 4, dtype=torch.bool).scatter(1, best, True)
    return torch.where(allowed.repeat_interleave(2, dim=1), scores, 0.0)
