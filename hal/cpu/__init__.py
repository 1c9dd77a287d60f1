"""The host CPU as a platform: host memory is the device memory."""
