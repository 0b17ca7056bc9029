"""Predicts what a deployment will do: profiles, a simulator, and how both were held to published figures."""
