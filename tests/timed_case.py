"""A case of scripts/benchmark.py that a CPU times in seconds: the smallest shape."""

from jflash.evals.benchmark_case import Task
from jflash.evals.benchmark_report import collect

TASK = Task(
    shape="tiny", target=None, drafter=None, batch=2, context=200, capacity=512, widths=(4,),
    only_step=False, dtype="float32", backends={}, steps=9, repeats=2, prompts=(),
    max_new_tokens=12, stop_token_ids=(),
)  # fmt: skip


def result(case: dict, device: str = "GPU", **changes) -> dict:
    return collect([case | {"device": device} | changes], None)
