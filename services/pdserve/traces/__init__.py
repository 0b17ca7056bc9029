"""A trace store for one deployment: OTLP in, Jaeger's query API, our own API and a page out."""
