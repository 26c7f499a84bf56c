"""Plan execution: every MoE layer of every micro-batch served by homes and replicas, as a plan says."""
