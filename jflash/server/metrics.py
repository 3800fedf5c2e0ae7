"""Figures for Prometheus under vLLM's names, so that dashboards and benchmark clients read them."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from jflash.serving.request import Event, Request
from jflash.serving.stats import SIZES, Stats

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
COUNTS = tuple(n * 10**e for e in range(6) for n in (1, 2, 5))  # of tokens
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)


@dataclass
class Tokens:
    """Counts that change with each step: plain numbers, which only the event loop's thread adds
    to. Prometheus' own counters take a lock for each."""

    prompt: int = 0
    new: int = 0
    hits: int = 0
    queries: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    places: list[int] = field(default_factory=list)  # drafts kept, by their place
    seconds: float = 0.0  # between steps, in all
    between: list[int] = field(default_factory=lambda: [0] * (len(SHORT) + 1))  # by SHORT, or above

    def families(self) -> Iterator[tuple[str, str, int]]:
        """The names, texts and values for Prometheus."""
        yield "prompt_tokens", "Tokens of prompts.", self.prompt
        yield "generation_tokens", "New tokens.", self.new
        yield "prefix_cache_hits", "Prompt tokens that were cached.", self.hits
        yield "prefix_cache_queries", "Prompt tokens looked up.", self.queries
        yield "spec_decode_num_drafts", "Steps that verified drafts.", self.steps
        yield "spec_decode_num_draft_tokens", "Drafts made within the limit.", self.drafted
        yield "spec_decode_num_accepted_tokens", "Drafts kept.", self.accepted


class Times(NamedTuple):
    """Seconds from a request's submission; `queued` until slot and pages were given, None if none
    were, and `first` until the first token."""

    queued: float | None
    first: float
    whole: float


class Metrics:
    """The counts of one model's requests; `stats` gives the engine's present state."""

    def __init__(self, model: str, drafts: int, stats: Callable[[], Stats]) -> None:
        self._registry = CollectorRegistry()
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name", *labels], registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self._registry
            ).labels(model)

        self._tokens = Tokens(places=[0] * drafts)
        self._registry.register(_Now(model, stats, self._tokens))
        self._ended = counter("request_success", "Requests that ended.", "finished_reason")
        self.rejected = counter("admission_rejections", "Refused: the queue is full.").labels(model)
        self.compiled = Counter(
            "jflash:compilations",
            "Programs compiled since the start.",
            registry=self._registry,
        )
        self._first = histogram("time_to_first_token_seconds", "To the first token.", SHORT)
        self._each = histogram(
            "request_time_per_output_token_seconds", "Mean of a request's new tokens.", SHORT
        )
        self._whole = histogram("e2e_request_latency_seconds", "Whole requests.", LONG)
        self._queued = histogram("request_queue_time_seconds", "Until slot and pages.", LONG)
        self._prefill = histogram(
            "request_prefill_time_seconds", "From slot and pages to the first token.", LONG
        )
        self._ran = histogram("request_inference_time_seconds", "From slot and pages on.", LONG)
        self._rest = histogram("request_decode_time_seconds", "From the first token on.", LONG)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", COUNTS)
        self._new = histogram("request_generation_tokens", "New tokens of a request.", COUNTS)
        self._most = histogram("request_params_max_tokens", "Of them at most.", COUNTS)

    def began(self, prompt_tokens: int) -> None:
        self._tokens.prompt += prompt_tokens

    def step(self, event: Event, prompt_tokens: int, seconds: float, first: bool) -> None:
        """An event that came `seconds` after the one before it, or after the request."""
        if not event.token_ids:
            return
        tokens = self._tokens
        if first:
            self._first.observe(seconds)
            tokens.queries += prompt_tokens
            tokens.hits += event.cached_tokens
        else:
            tokens.seconds += seconds
            tokens.between[bisect_left(SHORT, seconds)] += 1
        tokens.new += len(event.token_ids)
        if event.drafted:
            tokens.steps += 1
            tokens.drafted += event.drafted
            tokens.accepted += event.accepted
            for place in range(event.accepted):
                tokens.places[place] += 1

    def ended(self, reason: str, request: Request, tokens: int, times: Times) -> None:
        self._ended.labels(self._model, reason).inc()
        self._whole.observe(times.whole)
        self._prompt.observe(len(request.prompt_ids))
        self._new.observe(tokens)
        self._most.observe(request.max_tokens)
        decoding = times.whole - times.first
        if tokens:
            self._rest.observe(decoding)
        if tokens > 1:
            self._each.observe(decoding / (tokens - 1))
        if times.queued is not None:
            # The engine's clock began when it took the request, a little before that of the others.
            self._queued.observe(times.queued)
            self._ran.observe(max(0.0, times.whole - times.queued))
            if tokens:
                self._prefill.observe(max(0.0, times.first - times.queued))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Now(Collector):
    """The engine's state and the tokens when Prometheus asks."""

    def __init__(self, model: str, stats: Callable[[], Stats], tokens: Tokens) -> None:
        self._model, self._stats, self._tokens = model, stats, tokens

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in (
            ("num_requests_running", "Requests that step, at most the batch.", stats.running),
            ("num_requests_waiting", "Requests that wait for a place.", stats.waiting),
            ("kv_cache_usage_perc", "Share of pages that requests hold.", _held(stats)),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        if stats.device_bytes is not None:
            text = "In use on the device."
            yield GaugeMetricFamily("jflash:device_memory_bytes", text, value=stats.device_bytes)
        preempted = "Requests that gave their pages back."
        for name, text, value in (
            *((f"vllm:{name}", text, value) for name, text, value in self._tokens.families()),
            ("vllm:num_preemptions", preempted, stats.preempted),
            ("jflash:device_busy_seconds", "The device computed, at most.", stats.busy_seconds),
            ("jflash:device_seen_busy_seconds", "Of these, for certain.", stats.seen_seconds),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts kept, by place.",
            labels=["model_name", "position"],
        )  # fmt: skip
        for place, kept in enumerate(self._tokens.places):
            places.add_metric([self._model, str(place)], kept)
        yield places
        rounds, in_all = stats.rounds_by_tokens, stats.computed + stats.new_tokens
        for name, text, edges, counts, whole in (
            ("inter_token_latency_seconds", "Between two steps.", SHORT,
             self._tokens.between, self._tokens.seconds),
            ("iteration_tokens_total", "Tokens of a round of the engine.", SIZES, rounds, in_all),
        ):  # fmt: skip
            sums = zip((*map(str, edges), "+Inf"), accumulate(counts), strict=True)
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self._model], list(sums), whole)
            yield family


def _held(stats: Stats) -> float:
    return 1 - stats.pages_available / stats.pages


def of_replicas(texts: Mapping[str, bytes]) -> bytes:
    """The figures of several servers, by their names, with a label that says whose each is."""
    families = dict[str, Metric]()
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            about = family.name, family.documentation, family.type
            kept = families.setdefault(family.name, Metric(*about))
            for sample in family.samples:
                labels = sample.labels | {"replica": replica}
                kept.add_sample(sample.name, labels, sample.value)
    registry = CollectorRegistry()
    registry.register(_Read(list(families.values())))
    return generate_latest(registry)


class _Read(Collector):
    """Figures that another process has counted."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
