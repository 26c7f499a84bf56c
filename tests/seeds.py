"""Seeds for the devices that are there.

For each kind of device that has not begun, `torch.manual_seed` writes down its caller's stack, should the device begin
later: two milliseconds of each seed below pytest, and tests and checkpoints of activations seed thousands of times.
"""

import torch


def seed_no_absent_devices():
    """Until the process ends."""
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = _seed_none


def _seed_none(seed):
    """Of devices that are not there."""
