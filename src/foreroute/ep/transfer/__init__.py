"""From a schedule to moved weights: the engines that carry its moves out on torch.distributed."""
