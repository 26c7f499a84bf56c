"""Gate weights of each family, written down from its definition: the oracle for replay at given experts."""

import torch


def gate_weights(family, router, logits_RE, ids_RK, config):
    """[R, K] in the dtype of the logits."""
    if family in {"qwen3_moe", "olmoe", "mixtral"}:
        picked = logits_RE.exp().gather(-1, ids_RK)
        renormalised = family == "mixtral" or config.norm_topk_prob
        total = picked.sum(-1, keepdim=True) if renormalised else logits_RE.exp().sum(-1, keepdim=True)
        return picked / total
    if family == "gpt_oss":
        picked = logits_RE.gather(-1, ids_RK).exp()
        return picked / picked.sum(-1, keepdim=True)
    if family == "deepseek_v3":  # the bias steers selection and takes no part in the weight
        picked = (1 / (1 + torch.exp(-logits_RE))).gather(-1, ids_RK)
        return config.routed_scaling_factor * picked / picked.sum(-1, keepdim=True)
    if family == "deepseek_v2":  # the group limit steers selection and takes no part in the weight
        probs = logits_RE.exp() / logits_RE.exp().sum(-1, keepdim=True)
        return config.routed_scaling_factor * probs.gather(-1, ids_RK)
    raise KeyError(family)
