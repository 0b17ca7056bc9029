"""The engine port, its adapters `vllm` and `sim`, their hand-over logic, and the hosting around one engine."""
