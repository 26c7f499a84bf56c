"""What TEGroupedMLP asks of Transformer Engine, on the CPU: the interface of its GroupedLinear as Megatron wraps it.

Stands in for CUDA kernels alone. What it does with parameters, `main_grad` and marks on weights follows the sources of
2.9 to 2.20: it refuses other numbers of weights than gemms, overwrites `main_grad` in a first micro-batch, keeps what
finds `main_grad` through the weight until backward, and returns a gradient nobody may read where it has added one.
"""

import copy
import functools
import types
import weakref

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class GroupedLinear(torch.nn.Module):
    """Stands where TEColumnParallelGroupedLinear and TERowParallelGroupedLinear do."""

    def __init__(self, num_gemms, in_size, out_size, *, config, init_method, bias, pg_collection, **named):
        super().__init__()
        assert not bias
        self.num_gemms, self._pg_collection = num_gemms, pg_collection
        self.fuse_wgrad_accumulation = config.gradient_accumulation_fusion
        self.disable_parameter_transpose_cache = config.disable_parameter_transpose_cache
        self.is_first_microbatch = True
        device = "cpu" if config.use_cpu_initialization else "meta"
        assert device == "cpu" or config.init_model_with_meta_device, "else on a GPU"
        for i in range(num_gemms):
            drawn = torch.empty(out_size, in_size, device=device)  # in float32, as Megatron draws on the CPU
            weight = torch.nn.Parameter((drawn if device == "meta" else init_method(drawn)).to(config.params_dtype))
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{i}", weight)

    def forward(self, rows, m_splits):
        assert len(m_splits) == self.num_gemms
        assert all(weight.dtype == rows.dtype for _, weight in self.named_parameters())
        is_first = self.is_first_microbatch and not self.disable_parameter_transpose_cache
        self.is_first_microbatch = False
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        return Gemms.apply(rows, m_splits, self.fuse_wgrad_accumulation, is_first, *weights), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        groups, shards = self._pg_collection, {}
        for i in range(self.num_gemms):
            place = (len(sharded_offsets), groups.ep.rank() * self.num_gemms + i, groups.ep.size() * self.num_gemms)
            made = make_sharded_tensors_for_checkpoint(
                {"weight": getattr(self, f"weight{i}")},
                prefix,
                {},
                (*sharded_offsets, place),
                tp_group=groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            shard = shards[f"{prefix}weight{i}"] = made[f"{prefix}weight"]
            shard.replica_id = (*shard.replica_id[:2], groups.expt_dp.rank())
        return shards


class Gemms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sizes, fuses, is_first, *weights):
        ctx.sizes, ctx.fuses, ctx.is_first = sizes, fuses, is_first
        ctx.save_for_backward(rows, *weights)
        if fuses:
            ctx.found = [weakref.ref(weight) for weight in weights]
            ctx.main_grads = [lambda i=i: weights[i].main_grad for i in range(len(weights))]
        return torch.cat([part.mm(weight.t()) for part, weight in zip(rows.split(sizes), weights, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        rows, *weights = ctx.saved_tensors
        parts = list(zip(rows.split(ctx.sizes), grad.split(ctx.sizes), strict=True))
        grad_rows = torch.cat([d.mm(weight) for (_, d), weight in zip(parts, weights, strict=True)])
        grads = [added(ctx, i, x, d) if ctx.fuses else d.t().mm(x) for i, (x, d) in enumerate(parts)]
        return grad_rows, None, None, None, *grads


def added(ctx, i, rows, grad):
    """Add the gradient of a weight to its main_grad; what is returned tells hooks of it that there was one."""
    weight, main_grad = ctx.found[i](), ctx.main_grads[i]()
    assert weight is not None, "weight was removed while fuse_wgrad_accumulation=True"
    if ctx.is_first:
        main_grad.zero_()
    main_grad.add_(grad.to(main_grad.dtype).t().mm(rows.to(main_grad.dtype)))
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.full_like(main_grad, torch.nan, dtype=weight.dtype)


def use_grouped_experts(mlp):
    linears = types.SimpleNamespace(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear, activation_func=None)
    if isinstance(mlp, functools.partial):  # as from 0.18
        mlp.keywords["submodules"].experts = functools.partial(TEGroupedMLP, submodules=linears)
    else:
        mlp.submodules.experts = ModuleSpec(TEGroupedMLP, submodules=linears)


def fuse(chunks):
    """Have their experts add gradients of weights to main_grad; the rest of the model does not."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TEGroupedMLP):
                module.config = copy.copy(module.config)
                module.config.gradient_accumulation_fusion = True
                module.linear_fc1.fuse_wgrad_accumulation = module.linear_fc2.fuse_wgrad_accumulation = True
