"""From a schedule to moved weights: the engines that carry its moves out on torch.distributed.

`TransferEngine` moves what layers ask of replicas, by `peers` and by `host_memory`; `home_moves` and `segments` move
experts to other homes.
"""
