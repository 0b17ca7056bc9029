"""The daemon of a node that owns KV memory registrations, sessions and the registry of blocks."""
