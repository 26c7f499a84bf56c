#!/usr/bin/env bash
# Guess, written down before: Clang of the package ziglang chooses between versions of a function for several processors
# as Clang does (`target_clones`, `__builtin_cpu_supports`), so that one library can have loops for AVX2.
# Seen: with 0.17.1 it compiles and links, and finds no feature on any processor, not even SSE2, which every x86-64 has:
# the version for the oldest processor runs everywhere, without a word. Until 0.16.0 such a program does not link
# (undefined symbol: __cpu_indicator_init). The instruction itself (cpuid.h) tells the truth.
set -euo pipefail
[ "$(uname -m)" = x86_64 ] || { echo "this shows on x86-64 alone" >&2; exit 1; }
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cat > "$tmp/features.c" <<'C'
#include <cpuid.h>
#include <stdio.h>

int main(void) {
    unsigned a, b, c, d;
    __get_cpuid(1, &a, &b, &c, &d);
    __builtin_cpu_init();
    printf("cpuid: sse2 %d; __builtin_cpu_supports: sse2 %d, avx2 %d\n", (d & bit_SSE2) != 0,
           __builtin_cpu_supports("sse2") != 0, __builtin_cpu_supports("avx2") != 0);
}
C
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
pip() { "$tmp/venv/bin/pip" install --quiet --disable-pip-version-check "$@"; }
compile() { "$tmp/venv/bin/python" -m ziglang cc -O2 "$tmp/features.c" -o "$tmp/features"; }
pip ziglang==0.17.1
compile
seen=$("$tmp/features")
echo "ziglang 0.17.1: $seen"
[ "$seen" = "cpuid: sse2 1; __builtin_cpu_supports: sse2 0, avx2 0" ]
pip ziglang==0.16.0
if compile 2> "$tmp/errors"; then exit 1; fi
grep -m 1 "undefined symbol: __cpu_indicator_init" "$tmp/errors" | sed 's/^/ziglang 0.16.0: /'
