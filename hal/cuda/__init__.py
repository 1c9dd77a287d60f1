"""NVIDIA GPUs as a platform, through the CUDA driver."""
