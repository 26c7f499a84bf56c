"""Tools for tests of routed models: made-up routes, tiny models, equal bits, processes in a group, and devices that are
not here.

foreroute's own tests stand on it, and a user's may. Nothing of the product imports it. Its modules import what they
are about: `routes` numpy alone, `models` Hugging Face, `ranks` torch.distributed, `megatron_on_cpu` Megatron-Core.
"""
