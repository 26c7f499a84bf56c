"""Speed and size, measured as ratios in one run. `python -m benchmarks NAME --json [--quick]`."""
