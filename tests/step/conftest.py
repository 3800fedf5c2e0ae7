"""What several files of the step look at: the programs that JAX compiles."""

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
