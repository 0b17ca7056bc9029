"""From what people write to token ids; once per request, for both legs."""
