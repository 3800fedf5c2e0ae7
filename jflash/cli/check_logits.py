"""check-logits: bfloat16 by our kernels, bfloat16 by XLA and float32, side by side."""

import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jflash.bench.shapes import model_shape
from jflash.cli.command import Options
from jflash.cli.options.pair import shared_note
from jflash.cli.options.results import chosen_backends
from jflash.compiled.shape import Shape
from jflash.devices.backends import named, with_backends
from jflash.devices.mesh import over, tensor_mesh
from jflash.memory import check_memory, weight_bytes
from jflash.models.decoder import Target
from jflash.models.params import SCALE, random_weights
from jflash.pair import Models
from jflash.proof.forced import CAPACITY, CHUNK, PROMPT
from jflash.proof.program.step_program import cut
from jflash.proof.right_logits import FACTOR, NATS, ROWS, check_batch, failures, judge_of
from jflash.proof.usual_weights import usual_weights
from jflash.records.kernels import XLA
from jflash.system.device import describe_device, device_memory

FAILED = 1
DTYPE = "bfloat16"


def targets(args: Options) -> list[Models]:
    """The cut target at width 1 and at its drafter's; ValueError for what cannot run here."""
    shape = model_shape(args.shape)
    if jax.default_backend() == "cpu" and not args.shape.startswith("tiny"):
        raise ValueError(f"--shape {args.shape} takes hours on a CPU: use --shape tiny-moe here")
    config = cut(shape, min(args.layers, shape.target.num_layers), 1).target
    judge_of(config)  # before weights are made
    mesh, both = tensor_mesh(args.tensor_parallel), []
    for width in (1, shape.drafter.block_size):
        models = over(Models(Target(config), None, width), mesh, args.experts_over)
        models = with_backends(models, DTYPE, jax.devices()[0], **chosen_backends(args))
        if mesh is not None:
            models = replace(models, kernels=models.kernels._replace(gather=XLA.gather))
        decoding = Shape.of(args.batch[-1], CAPACITY, chunk=CHUNK)
        check_memory(models, decoding, PROMPT + ROWS, room(models))
        both.append(models)
    return both


def room(models: Models) -> int | None:
    """Bytes that the pass may take of the first device, which has the whole target if several
    share it."""
    limit = device_memory()
    if limit is None or models.mesh is None:
        return limit
    return limit - weight_bytes(models.configs)


def print_result(result: dict[str, Any]) -> None:
    """Prints a line a program, and from the second width on the differences to the first."""
    right = result["xla"]
    print(
        f"batch {result['batch']}, width {result['width']}, {result['rows']} rows, "
        f"{result['experts_reached']:.0f} experts a layer; "
        f"logits {right['spread']:.2f} apart, the largest probability {right['sure']:.2g}"
    )
    for name in ("ours", "xla", "fault"):
        d = result[name]
        print(
            f"  {name:<6}{nats(d)}, choices {d['choice_shortfall']:.2g} below the best; "
            f"{d['other_experts']:.2%} other experts, by {d['router_shortfall']:.2g} at most"
            + (f"; in one of {d['one_in']} columns" if "one_in" in d else "")
        )
    for name, d in result.get("against", {}).items():
        print(
            f"  {name:<6}against width {result['against_width']}: {nats(d)}; "
            f"{d['other_experts']:.2%} other experts"
        )


def nats(distance: dict[str, float]) -> str:
    d = distance
    return (
        f"{d['mean_nats']:.2e} nats, {d['most_nats']:.2e} at most, "
        f"a logit by {d['largest_difference']:.3f}, same best {d['same_best']:.1%}"
    )


def run(args: Options) -> Generator[dict[str, Any], None, int]:
    models, begin = targets(args), time.perf_counter()
    config = models[0].target.config
    [params] = random_weights([config], experts_scale=SCALE)
    params = usual_weights(config, params)
    # A norm begins every layer, so a larger embedding leaves the scale of what follows it.
    ratio = args.embedding_scale / SCALE
    params |= {"embedding": params["embedding"] * jnp.bfloat16(ratio)}
    results = []
    for batch in args.batch:
        for result in check_batch(models, params, batch, args.seed):
            print_result(result)
            results.append(result)
    wrong = failures(results)
    report = {
        **describe_device(),
        "shape": args.shape,
        "layers": config.num_layers,
        "dtype": DTYPE,
        "embedding_scale": args.embedding_scale,
        "seed": args.seed,
        **shared_note(args),
        "backends": {str(m.block_size): named(m.kernels) for m in models},
        "prompt_tokens": PROMPT,
        "judge": judge_of(config),
        "factor": FACTOR,
        "nats": NATS,
        "right_logits": results,
        "seconds": round(time.perf_counter() - begin, 1),
        "failures": wrong,
    }
    for line in wrong:
        print(line)
    yield report
    return FAILED if wrong else 0
