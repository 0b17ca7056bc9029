"""The engine port and its adapters: `vllm` and `sim`."""
