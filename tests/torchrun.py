"""A script or module on several processes of this machine, as torchrun starts them."""

import subprocess
import sys

STOPPED_WITHIN_S = 40
"""torchrun gives its processes 30 s to end before it kills them."""


def torchrun(num_ranks, *arguments, timeout, **options):
    """Run to the end, or stop all ranks: killing torchrun alone would leave them running.

    Args:
        arguments: a script and its arguments, or "-m" and a module.
        timeout: seconds.
        options: of `subprocess.Popen`.

    Raises:
        subprocess.TimeoutExpired: after the ranks were told to stop.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
    process = subprocess.Popen(
        [str(part) for part in (*command, *arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate(timeout=STOPPED_WITHIN_S)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
