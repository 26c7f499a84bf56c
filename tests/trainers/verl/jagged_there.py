"""Jagged tensors and batches of verl on the device that counts waits, which cannot hold those of torch."""

import torch


class Jagged(torch.Tensor):
    """What the passes ask a nested tensor for."""

    is_nested = property(lambda self: True)
    ndim = property(lambda self: self.parts[0].ndim + 1)

    @staticmethod
    def __new__(cls, values, offsets):
        made = torch.Tensor._make_subclass(cls, torch.empty(0))
        made.parts = values, offsets
        return made

    def values(self):
        return self.parts[0]

    def offsets(self):
        return self.parts[1]

    def unbind(self):
        return self.parts[0].tensor_split(self.parts[1][1:-1].cpu())

    def __len__(self):
        return len(self.parts[1]) - 1

    def is_floating_point(self):
        return self.parts[0].is_floating_point()


class MicroBatch(dict):
    """In the place of a TensorDict."""

    def select(self, *names):
        return MicroBatch({name: self[name] for name in names})

    def exclude(self, *names):
        return self.select(*(name for name in self if name not in names))

    def to(self, device):
        moved = {name: each.parts if isinstance(each, Jagged) else (each,) for name, each in self.items()}
        moved = {name: [part.to(device) for part in parts] for name, parts in moved.items()}
        return MicroBatch({name: Jagged(*parts) if len(parts) == 2 else parts[0] for name, parts in moved.items()})
