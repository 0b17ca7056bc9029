"""The decode service: takes over a prompt's KV and streams the answer."""
