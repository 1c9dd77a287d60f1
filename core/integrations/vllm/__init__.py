"""vLLM's sleep mode on this library, found through vLLM's entry points; see `plugin`."""
