"""AMD GPUs: the HIP runtime's virtual memory, torch's pools, amdsmi and sysfs."""
