"""The prefill service: computes a prompt's KV and holds it for one transfer."""
