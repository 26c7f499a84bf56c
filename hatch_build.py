"""Compiles the C++ of src/foreroute into the library that `foreroute.kernels` loads.

A build of a wheel does it, an editable install, `make kernels`, and `python hatch_build.py [FILE FLAGS...]`.

The compiler is Clang, as the package ziglang brings it: no system needs one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from zlib import crc32

SOURCE = Path(__file__).parent / "src" / "foreroute"
# No reordering of floating-point operations: a plan is the same on every processor.
FLAGS = (
    "-std=c++20 -O3 -ffp-contract=off -fwrapv -fno-exceptions -fno-rtti -nostdlib++ -shared -fPIC -fvisibility=hidden "
    "-s -Wall -Wextra -Werror"
)
LOOSEST_GLIBC = {"x86_64": "x86_64-linux-gnu.2.17", "aarch64": "aarch64-linux-gnu.2.17"}
"""What a wheel of Linux runs on."""


def compile_kernels(target: Path, *flags: str) -> None:
    """Compile all loops as one translation unit, so that every call may be inlined."""
    paths = sorted(SOURCE.rglob("*.[ch]pp"))
    unit = "".join(f'#include "{path.relative_to(SOURCE)}"\n' for path in paths if path.suffix == ".cpp")
    # `foreroute.kernels` compares it in a checkout
    unit += f"LOOP int64_t sources_checksum() {{ return {crc32(b''.join(path.read_bytes() for path in paths))}; }}\n"
    machine = sysconfig.get_platform().removeprefix("linux-").replace("-", "_")
    runs_on = ["-target", LOOSEST_GLIBC[machine]] if machine in LOOSEST_GLIBC else []
    command = [sys.executable, "-m", "ziglang", "c++", *FLAGS.split(), *runs_on, *flags]
    # put in place when it is whole: a process may have the old one loaded
    made = target.with_suffix(f".{os.getpid()}.so")
    command += [f"-I{SOURCE}", "-o", str(made), "-x", "c++", "-"]
    if subprocess.run(command, input=unit, text=True, check=False).returncode != 0:
        raise SystemExit(
            f"{target} was not compiled; the compiler says above why. It keeps a cache in the home folder, or in the "
            "one that ZIG_GLOBAL_CACHE_DIR names: one of them must be writable"
        )
    made.replace(target)


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # called as a script, where nothing is built
    BuildHookInterface = object


class KernelsHook(BuildHookInterface):
    """The hook of a wheel's build, and of an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say that the wheel is of this platform, for any Python."""
        compile_kernels(SOURCE / "_kernels.so")
        platform = sysconfig.get_platform().replace("linux-", "manylinux_2_17_").replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"py3-none-{platform}", "artifacts": ["src/foreroute/_kernels.so"]}


if __name__ == "__main__":
    compile_kernels(SOURCE / "_kernels.so" if len(sys.argv) < 2 else Path(sys.argv[1]), *sys.argv[2:])
