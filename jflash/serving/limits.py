"""What an engine of a layout can never serve, said before a request waits."""

from collections.abc import Iterable

from jflash.checks import check_ids
from jflash.pair import Models
from jflash.records.decoding import whole
from jflash.serving.calls.layout import KINDS, Kind, Layout
from jflash.serving.calls.slots import most_of
from jflash.serving.request import BIASED, Request, TooLong, checked_request
from pallas_kernels.block_attention import PAGE

# An engine's sizes that may be None.
OPTIONAL = ("pages", "prefill_chunk", "prompts_at_once", "states", "steps_per_call")


def check_sizes(least: int = 1, **sizes: int | None) -> None:
    """ValueError for one of an engine's sizes that is no whole number from `least` up."""
    for name, value in sizes.items():
        if (value is not None or name not in OPTIONAL) and whole(name, value) < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def checked_kinds(kinds: Iterable[Kind]) -> tuple[Kind, ...]:
    """The kinds of requests that an engine serves. ValueError unless they are some of KINDS."""
    some = tuple(kinds) if isinstance(kinds, Iterable) else ()
    if not some or any(kind not in KINDS for kind in some):
        raise ValueError(f"kinds {kinds!r} must be a tuple of some of {KINDS}")
    return some


def checked_counts(
    counts: Iterable[int] | None, batch: int, refusal: str | None
) -> tuple[int, ...] | None:
    """The numbers of slots that a call may serve. ValueError unless they are of 1 to `batch`, or
    for fewer than `batch` where all must step together, which `refusal` tells."""
    if counts is None:
        return None
    if not isinstance(counts, Iterable):
        raise ValueError(
            f"slots_at_once {counts!r} must be several numbers of slots, as ({counts!r},)"
        )
    some = tuple(counts)
    for count in some:
        if not 1 <= whole("slots_at_once", count) <= batch:
            raise ValueError(f"slots_at_once {count}: it must be 1 to {batch}, the engine's slots")
        if refusal and count < batch:
            raise ValueError(f"slots_at_once {count}: {refusal}")
    return some


def checked_ahead(ahead: int | None, refusal: str | None) -> int | None:
    """The requests whose prompts are computed ahead. ValueError for a negative number, or for one
    above 0 where the device cannot take some slots, which `refusal` tells."""
    if ahead is None:
        return None
    if whole("prompts_ahead", ahead) < 0:
        raise ValueError(f"prompts_ahead must be at least 0, got {ahead}")
    if refusal and ahead:
        raise ValueError(f"prompts_ahead {ahead}: {refusal}")
    return ahead


def check(request: Request, models: Models, layout: Layout, max_context: int) -> None:
    """ValueError, naming the field and its value, for a request that the engine never serves."""
    checked_request(request)
    check_ids(models, request.prompt_ids, request.stop_ids)
    prompt, total = len(request.prompt_ids), len(request.prompt_ids) + request.max_tokens
    if total > max_context:
        raise ValueError(
            f"{prompt} prompt tokens + max_tokens {request.max_tokens} pass the engine's "
            f"{max_context} tokens: give fewer"
        )
    if request.needs_logits and "drawn" not in layout.kinds:
        why = "the engine was made for requests of the kind 'greedy' alone, without 'drawn'"
        raise ValueError(f"{_beyond_argmax(request)}: {why}")
    if -(-total // PAGE) > layout.page_count:
        raise TooLong(
            f"{prompt} prompt tokens + max_tokens {request.max_tokens} pass the engine's "
            f"{layout.page_count} pages of {PAGE} tokens: give fewer"
        )
    vocabulary = models.target.config.vocab_size
    outside = [token for token in request.logit_bias if not 0 <= token < vocabulary]
    if outside:
        raise ValueError(f"logit_bias of token {outside[0]}: there are {vocabulary} tokens")
    if len(request.logit_bias) > BIASED:
        raise ValueError(f"{len(request.logit_bias)} logit_bias tokens: at most {BIASED} fit")
    if request.draft_rule == "sampled" and models.draft_rule != "sampled" and models.drafter:
        raise ValueError("draft_rule 'sampled': the engine's pair has the rule 'greedy'")
    for name in ("top_logprobs", "prompt_logprobs"):
        if (getattr(request, name) or 0) > most_of(models):
            raise ValueError(f"{name} {getattr(request, name)}: there are {vocabulary} tokens")
    room = layout.shape.stop_slots
    if len(request.stop_ids) > room:
        raise ValueError(f"{len(request.stop_ids)} stop_ids: at most {room} fit")
    if request.grammar is not None:
        missing = set(request.grammar.stop_ids) - set(request.stop_ids)
        if missing:
            raise ValueError(f"the grammar's end {min(missing)} is not among the stop_ids")
        if request.grammar.vocabulary != vocabulary:
            raise ValueError(
                f"the grammar is of {request.grammar.vocabulary} tokens, the model has {vocabulary}"
            )


def _beyond_argmax(request: Request) -> str:
    """What such a request `needs_logits` for: the first field, and its value."""
    names = ("logprobs", "logit_bias", "min_tokens")
    names += ("repetition_penalty", "frequency_penalty", "presence_penalty")
    values = {"temperature": request.sampling.temperature}
    values |= {name: getattr(request, name) for name in names}
    usual = {"repetition_penalty": 1}
    return next(f"{n} {v!r:.80}" for n, v in values.items() if v and v != usual.get(n))
