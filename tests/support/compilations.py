"""The programs that JAX compiles while a test runs."""

import jax
import pytest


@pytest.fixture
def compilations():
    """The seconds of every compilation from here on, by JAX's own events."""
    events = []

    def listen(name: str, seconds: float, **_) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)
