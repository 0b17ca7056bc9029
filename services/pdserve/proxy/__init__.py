"""The proxy: admits, tokenises, chooses engines, drives both legs of a request, streams the answer."""
