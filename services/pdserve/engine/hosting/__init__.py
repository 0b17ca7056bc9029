"""A gRPC service around one engine: what the prefill and decode services share."""
