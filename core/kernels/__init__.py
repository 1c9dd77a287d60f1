"""Kernels that take their scratch from the workspace, each with a plain-torch reference."""
