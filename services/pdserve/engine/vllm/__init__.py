"""vLLM as an engine: the adapter, its KV connector, and tiny models to run it with."""
