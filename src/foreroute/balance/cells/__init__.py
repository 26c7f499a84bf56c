"""The cell level of the planner, compiled: replicas and quotas of one (micro-step, layer), and who serves what."""
