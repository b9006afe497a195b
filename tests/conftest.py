"""Properties run without a deadline per example: machines that run the tests are shared, and a slow example is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("cepheid", deadline=None)
settings.load_profile("cepheid")
