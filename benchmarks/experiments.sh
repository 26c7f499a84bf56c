#!/usr/bin/env bash
# Trains with every routing mode and three seeds from the demo's configuration, then compares them on one page.
# A run that is there already is resumed. Usage: benchmarks/experiments.sh FOLDER
set -euo pipefail
folder=${1:?usage: benchmarks/experiments.sh FOLDER}
base=$(python -c 'from importlib.resources import files; print(files("foreroute.cli") / "arithmetic.toml")')
mkdir -p "$folder"
runs=()
for seed in 0 1 2; do
  for routing in none R2 R3; do
    name=$routing-seed$seed
    sed -e "s/^name = .*/name = \"$name\"/" -e "s/^seed = .*/seed = $seed/" \
        -e "s/^routing = .*/routing = \"$routing\"\nmini_steps = 4\nmicro_step_tokens = 2048/" \
        -e "s/^learning_rate = .*/learning_rate = 2e-4/" "$base" > "$folder/$name.toml"
    resume=()
    if [ -d "$folder/$name" ]; then resume=(--resume); fi
    foreroute train "$folder/$name.toml" --folder "$folder/$name" "${resume[@]}"
    runs+=("$folder/$name")
  done
done
foreroute report "${runs[@]}" --output "$folder/report.html"
