"""Intel GPUs: Level Zero, SYCL's context and torch's XPU pools."""
