"""Gate weights of every family, written down from its definition: the oracle for replay at given experts.

Each formula is also held against an untouched router at its own picks: none can be wrong in the way of replay.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch.nn.functional import logsigmoid, softplus

from foreroute.core import select_at
from foreroute.core.selecting import Gate as Gates

SCORES = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: 1 / (1 + torch.exp(-logits)),
    "sqrt_softplus": lambda logits: softplus(logits).sqrt(),
    "probabilities": lambda probabilities: probabilities,
}


@dataclass(frozen=True)
class Gate:
    """w = scale * score[ids], divided by (its sum over the picks + epsilon) where `renormalise`."""

    score: str = "softmax"  # a key of `SCORES`
    renormalise: bool = False
    scale: float = 1.0
    epsilon: float = 0.0
    logits: int = 0  # their place in what a router returns
    weights: Callable | None = None  # another rule: (router, hidden, logits [R, E], ids [R, K]) to float64 [R, K]
    label: str = ""  # where the fields above do not say it all
    handed_on: Callable | None = None  # reads (weights, ids), both [R, K], off what a router returns, given K
    of_picks: bool = False  # scores of the picks alone, which are the same but for rounding

    def __str__(self):
        return self.label or self.score.replace("_", " ") + (" / sum" if self.renormalise else "")

    def expected(self, router, hidden, logits, ids_RK):
        """float64 [R, K]."""
        logits_RE = logits.reshape(-1, logits.shape[-1]).double()
        if self.weights is not None:
            return self.weights(router, hidden, logits_RE, ids_RK)
        score = self.score
        if score == "softmax" and torch.allclose(logits_RE.sum(-1), logits_RE.new_ones(len(logits_RE))):
            score = "probabilities"  # which transformers 5.3 hands on as logits
        picked = SCORES[score](logits_RE).gather(-1, ids_RK)
        if self.renormalise:
            picked = picked / (picked.sum(-1, keepdim=True) + self.epsilon)
        return self.scale * picked

    def selected(self, logits, ids_RK, **native):
        """What `select_at` makes of it: weights and ids [R, K]."""
        gate = self.score + " of picks" * self.of_picks
        if gate not in get_args(Gates):
            gate, logits = "scores", SCORES[self.score](logits)
        rest = {"normalize": self.renormalise and gate != "softmax of picks", "scale": self.scale}
        rest |= {"epsilon": self.epsilon} if self.epsilon else {}
        return select_at(logits.reshape(-1, logits.shape[-1]), ids_RK, gate=gate, **rest, **native)

    def read(self, output, top_k):
        """Weights and ids, both [R, K], that a router hands on: by default its last two outputs in either order."""
        if self.handed_on is not None:
            return self.handed_on(output, top_k)
        parts = [part.reshape(-1, top_k) for part in output if part.shape[-1] == top_k]
        return next(p for p in parts if p.is_floating_point()), next(p for p in parts if not p.is_floating_point())


def _per_expert_scale(router, hidden, probabilities, ids):
    picked = probabilities.gather(-1, ids)
    return picked / picked.sum(-1, keepdim=True) * router.per_expert_scale.double()[ids]


def _with_shared_experts(router, hidden, logits, ids):
    """Inkling: the shared experts, the last rows of its projection, take part in the sum."""
    shared = (hidden.reshape(-1, hidden.shape[-1]) @ router.weight[router.num_experts :].T).double()
    chosen = logsigmoid(torch.cat([logits.gather(-1, ids), shared], dim=-1))
    return (chosen.softmax(-1) * router.route_scale * router.global_scale.double())[..., : ids.shape[-1]]


def _without_logits(router, hidden, logits, ids):
    """Longcat Flash: older releases hand on no logits."""
    scores = router.classifier(hidden.reshape(-1, hidden.shape[-1]).float()).double().softmax(-1)
    return 6.0 * scores.gather(-1, ids)


def _skip_class(router, hidden, logits, ids):
    return logits.softmax(-1).gather(-1, ids) * (ids != router.num_experts)


def _bands(router, hidden, logits, ids):
    """PhiMoE: a softmax over the band below the best score, in which the replayed expert counts as well."""
    weights, open_scores = [], logits
    for pick in ids.T:
        best = open_scores.max(-1, keepdim=True).values
        within = (best - logits) / torch.maximum(logits.abs(), best) <= 2 * router.router_jitter_noise
        within = within.scatter(-1, pick[:, None], True)
        scores = open_scores.masked_fill(~within, -torch.inf)
        weights.append(scores.softmax(-1).gather(-1, pick[:, None]))
        open_scores = open_scores.scatter(-1, pick[:, None], -torch.inf)
    return torch.cat(weights, -1)


def _scattered(output, top_k):
    gates = output[0]
    ids = gates.nonzero()[:, 1].view(-1, top_k)
    return gates.gather(-1, ids), ids


def _sorted_by_expert(output, top_k):
    order, _, gates, sizes, _ = output
    expert_of_sorted = torch.tensor([expert for expert, size in enumerate(sizes) for _ in range(size)])
    position = order.argsort()
    return gates[position].view(-1, top_k), expert_of_sorted[position].view(-1, top_k)


GATES_OF_SEVERAL = [
    (Gate(), "deepseek_ocr2 deepseek_v2 flex_olmo jamba olmoe qwen2_moe qwen3_moe unlimited_ocr"),
    (
        Gate(renormalise=True),
        "ernie4_5_moe ernie4_5_vl_moe hunyuan_v1_moe lara_mini mellum minimax mistral4 mistral_large4 mixtral "
        "qwen3_5_moe qwen3_next qwen3_omni_moe qwen3_vl_moe qwen4_exp",
    ),
    (
        Gate(renormalise=True, of_picks=True),
        "aria cohere2_moe gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared",
    ),
    (Gate("sigmoid"), "dots1"),
    (Gate("sigmoid", of_picks=True), "kolibri1"),
    (
        Gate("sigmoid", renormalise=True),
        "afmoe beam dots3_note flint glm4_moe glm4v_moe laguna mimo_v2_flash minimax_m2 minimax_m3_vl muse_spark "
        "nemotron_h solar_open step3p7",
    ),
    (
        Gate("sigmoid", renormalise=True, scale=2.5),
        "axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 exaone_moe glm5_next glm_moe_dsa sarvam_mla sarvam_moe",
    ),
    (Gate("sigmoid", renormalise=True, scale=2.827), "hy_v4 hy_v4_vl"),
    (Gate("probabilities", weights=_per_expert_scale, label="softmax / sum x expert scale"), "diffusion_gemma gemma4"),
]
GATES = {name: gate for gate, names in GATES_OF_SEVERAL for name in names.split()} | {
    "dbrx": Gate(renormalise=True),
    "deepseek_v4": Gate("sqrt_softplus", renormalise=True, scale=1.5, label="sqrt softplus / sum; hash layers"),
    "glm4_moe_lite": Gate("sigmoid", renormalise=True, scale=1.8),
    "hy_v3": Gate("sigmoid", renormalise=True, scale=2.826),
    "inkling": Gate(weights=_with_shared_experts, label="sigmoid / sum with shared experts"),
    "inkling2": Gate("sigmoid", renormalise=True, scale=8.0),
    "jetmoe": Gate(
        "softmax", True, logits=4, handed_on=_sorted_by_expert, label="softmax / sum; also in attention", of_picks=True
    ),
    "kimi_linear": Gate("sigmoid", renormalise=True, scale=2.446),
    "lfm2_moe": Gate("sigmoid", renormalise=True, epsilon=1e-6),
    "llama4": Gate("sigmoid", logits=1, handed_on=_scattered),
    "longcat_flash": Gate(weights=_without_logits, label="softmax; zero experts"),
    "openai_privacy_filter": Gate(renormalise=True, scale=0.5, of_picks=True),
    "phimoe": Gate(weights=_bands, label="sparsemixer"),
    "zaya": Gate(weights=_skip_class, label="softmax; skip class"),
}
