"""What all tests have in common."""

from hypothesis import HealthCheck, settings

# How fast examples are made says how busy the machine is, and nothing about us.
settings.register_profile("headrace", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("headrace")
