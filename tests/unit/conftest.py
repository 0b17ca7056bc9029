"""What holds for every unit test."""

from hypothesis import HealthCheck, settings

# An example may take as long as the machine makes it take: by default hypothesis fails one that takes 200 ms, and one
# whose data takes a second to draw. Where one fails, what it printed plays it again.
settings.register_profile(
    "any machine", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("any machine")
