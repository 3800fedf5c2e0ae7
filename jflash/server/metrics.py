"""Figures for Prometheus under vLLM's names, so that dashboards and benchmark clients read them."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jflash.serving.engine import Stats
from jflash.serving.request import Event

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)


class Metrics:
    """The counts of one model's requests; `stats` gives the engine's present state."""

    def __init__(self, model: str, drafts: int, stats: Callable[[], Stats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(model, stats))
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name", *labels], registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self._registry
            ).labels(model)

        self._prompt = counter("prompt_tokens", "Tokens of prompts.").labels(model)
        self._new = counter("generation_tokens", "New tokens.").labels(model)
        self._hits = counter("prefix_cache_hits", "Prompt tokens that were cached.").labels(model)
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up.").labels(model)
        self._ended = counter("request_success", "Requests that ended.", "finished_reason")
        self.rejected = counter("admission_rejections", "Refused: the queue is full.").labels(model)
        self._steps = counter("spec_decode_num_drafts", "Steps that verified drafts.").labels(model)
        self._drafted = counter(
            "spec_decode_num_draft_tokens", "Drafts made within the limit."
        ).labels(model)
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafts kept.").labels(model)
        places = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts kept, by place.", "position"
        )
        self._places = [places.labels(model, str(i)) for i in range(drafts)]
        self.compiled = Counter(
            "jflash:compilations",
            "Programs compiled since the start.",
            registry=self._registry,
        )
        self._first = histogram("time_to_first_token_seconds", "To the first token.", SHORT)
        self._between = histogram("inter_token_latency_seconds", "Between two steps.", SHORT)
        self._each = histogram(
            "request_time_per_output_token_seconds", "Mean of a request's new tokens.", SHORT
        )
        self._whole = histogram("e2e_request_latency_seconds", "Whole requests.", LONG)

    def began(self, prompt_tokens: int) -> None:
        self._prompt.inc(prompt_tokens)

    def step(self, event: Event, prompt_tokens: int, seconds: float, first: bool) -> None:
        """An event that came `seconds` after the one before it, or after the request."""
        if not event.token_ids:
            return
        if first:
            self._first.observe(seconds)
            self._queries.inc(prompt_tokens)
            self._hits.inc(event.cached_tokens)
        else:
            self._between.observe(seconds)
        self._new.inc(len(event.token_ids))
        if event.drafted:
            self._steps.inc()
            self._drafted.inc(event.drafted)
            self._accepted.inc(event.accepted)
            for place in self._places[: event.accepted]:
                place.inc()

    def ended(self, reason: str, tokens: int, first_seconds: float, seconds: float) -> None:
        self._ended.labels(self._model, reason).inc()
        self._whole.observe(seconds)
        if tokens > 1:
            self._each.observe((seconds - first_seconds) / (tokens - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Now(Collector):
    """The engine's state when Prometheus asks."""

    def __init__(self, model: str, stats: Callable[[], Stats]) -> None:
        self._model, self._stats = model, stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in (
            ("num_requests_running", "Requests in slots.", stats.running),
            ("num_requests_waiting", "Requests in the queue.", stats.waiting),
            ("kv_cache_usage_perc", "Share of pages that requests hold.", _held(stats)),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        preempted = CounterMetricFamily(
            "vllm:num_preemptions", "Requests that gave their pages back.", labels=["model_name"]
        )
        preempted.add_metric([self._model], stats.preempted)
        yield preempted
        busy = CounterMetricFamily(
            "jflash:device_busy_seconds", "In which the device computed.", labels=["model_name"]
        )
        busy.add_metric([self._model], stats.busy_seconds)
        yield busy


def _held(stats: Stats) -> float:
    return 1 - stats.pages_available / stats.pages
