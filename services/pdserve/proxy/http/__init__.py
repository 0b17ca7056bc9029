"""The OpenAI face: completions and chat over HTTP, with server-sent events."""
