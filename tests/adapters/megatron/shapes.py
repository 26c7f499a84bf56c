"""Models whose routed layers are not simply all of them, and routers that score otherwise."""

from grid import Cell


def with_settings(cell_settings, **cell):
    """A cell with more of TransformerConfig said."""
    return Cell(settings=tuple(cell_settings.items()), **cell)


SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5}
BIASED = {**SIGMOID, "moe_router_enable_expert_bias": True}

SHAPES = {
    "dense first, on two stages": with_settings({"moe_layer_freq": [0, 1, 1, 1]}, pp=2, recompute="uniform"),
    "a stage of dense layers": with_settings({"moe_layer_freq": [0, 0, 1, 1]}, pp=2, recompute="block"),
    "a virtual stage of dense layers": with_settings(
        {"moe_layer_freq": [0, 1, 1, 1]}, pp=2, vpp=2, recompute="uniform"
    ),
    "dense and routed by turns": with_settings({"moe_layer_freq": [1, 0, 1, 0]}, pp=2, vpp=2, packed=True),
    "a short first stage": with_settings({"num_layers_in_first_pipeline_stage": 1}, pp=2, recompute="selective"),
    "short first virtual stages": with_settings(
        {"num_layers_in_first_pipeline_stage": 2}, pp=2, vpp=2, layers=6, recompute="uniform"
    ),
    "short last virtual stages, dense first": with_settings(
        {"num_layers_in_last_pipeline_stage": 2, "moe_layer_freq": [0, 1, 1, 0, 1, 1]},
        pp=2,
        vpp=2,
        layers=6,
        recompute="block",
        packed=True,
    ),
    "stages written down": with_settings(
        {"pipeline_model_parallel_layout": "Et|ttt|t|tL"}, pp=2, vpp=2, layers=6, recompute="uniform"
    ),
    "multi-token prediction": with_settings({"mtp_num_layers": 1}),
    "multi-token prediction on the last stage": with_settings({"mtp_num_layers": 1}, pp=2, recompute="uniform"),
    "experts over tensor ranks": with_settings({}, ep=2, tp=2, etp=2, dispatcher="allgather", recompute="uniform"),
    "experts over four ranks": with_settings({}, ep=4, recompute="selective"),
    "two blocks to a checkpoint": with_settings({"recompute_num_layers": 2}, recompute="uniform"),
}
"""name: cell."""

SCORES = {
    "softmax before top-k": with_settings({"moe_router_pre_softmax": True}, recompute="uniform"),
    "sigmoid": with_settings(SIGMOID, recompute="uniform"),
    "sigmoid with expert bias": with_settings(BIASED, recompute="uniform"),
    "limited to groups": with_settings(
        {**BIASED, "moe_router_num_groups": 4, "moe_router_group_topk": 2}, recompute="uniform"
    ),
    # without padding, which replay keeps out of these losses and Megatron without a padding mask does not
    "auxiliary loss": with_settings(
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}, recompute="uniform", packed=True
    ),
    "sequence auxiliary loss and z-loss": with_settings(
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01},
        recompute="uniform",
        packed=True,
    ),
    "shared expert": with_settings({"moe_shared_expert_intermediate_size": 32}, recompute="uniform"),
}
