"""The `pdserve` command: thin, starts services as processes and imports none of them."""
