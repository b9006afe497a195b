"""Properties run without limits on time: machines that run the tests are shared, and a slow example is no failure."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("cepheid", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cepheid")
