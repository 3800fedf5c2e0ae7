"""check-lossless --checks ops: each operation alone, and what breaks the law."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jflash.models.decoder import Target
from jflash.proof import ops
from jflash.records.kernels import Kernels
from jflash.records.specs import MoeSpec
from tests.support.attention_checks import ON_GPU
from tests.support.lossless_case import small_case

pytestmark = pytest.mark.skipif(ON_GPU, reason="these are a CPU's operations")


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Sizes that a CPU compiles soon."""
    for name, value in {
        "MOST": 48, "ROWS": (1, 17), "BEFORE": 70, "SLOTS": 256, "SEQUENCES": (2,),
    }.items():  # fmt: skip
        monkeypatch.setattr(ops, name, value)


def models_of(*kernels: str):
    """The small pair's with experts in its first layer."""
    models = small_case().models
    moe = MoeSpec(num_experts=4, experts_per_token=2, intermediate_size=48, renormalise=True)
    target = Target(models.target.config.with_experts(moe, (0,)))
    return replace(models, target=target, kernels=Kernels(*kernels))


def test_every_operation_keeps_a_rows_bits():
    noted = []
    found = ops.check_ops(models_of(*["cpu"] * 5), noted.append)
    assert ops.failures_of_ops(found | {"pair": "small"}) == []
    assert [*found["ops"], found["planted"]] == noted and found["differences"] == 0
    names = [each["op"] for each in found["ops"]]
    assert {"qkv", "norm", "attention of a block", "experts", "logits"} < set(names)
    counts = {each["op"]: each["compared_rows"] for each in found["ops"]}
    assert counts["experts"] == 18 and counts["attention of sequences of one row"] == 2


def test_operations_that_break_the_law_are_named(monkeypatch):
    """XLA's products; and a planted product that nobody tells apart vouches for nothing."""
    few = ("qkv", ops.PLANTED)
    each_of = ops.ops_of

    def some(models):
        return (op for op in each_of(models) if op.name in few)

    monkeypatch.setattr(ops, "ops_of", some)
    found = ops.check_ops(models_of("cpu", "xla", "cpu", "cpu", "cpu"), lambda _: None)
    lines = ops.failures_of_ops(found | {"pair": "small"})
    assert lines[0] == "small: qkv alone gives other bits"
    found["planted"]["differing_rows"] = 0
    assert ops.failures_of_ops(found | {"pair": "small"})[1:] == [
        "small: XLA's product gave a row the same bits: nothing was shown"
    ]


def test_a_devices_part_of_a_product_has_the_wholes_bits(monkeypatch):
    """Of whole numbers, whose sums are exact; a part that is cut in other columns is found."""
    monkeypatch.setattr(ops, "DEVICES", (2,))
    draw = lambda *sizes: jax.random.randint(jax.random.key(len(sizes)), sizes, -9, 9) * 1.0  # noqa: E731
    w, x = draw(8, 64), draw(48, 8)
    for halves in (1, 2):

        def product(w, x, halves=halves):
            return jnp.stack(jnp.split(x @ w, halves, axis=1)).sum(axis=0)

        whole = ops.Op("some", product, product, w, (x,), (1, 17))
        assert [each.name for each in ops.with_parts(whole, "cpu")] == ["some"]
        part = list(ops.with_parts(whole, "canonical", halves))[1]
        assert part.name == "some, 1 of 2" and part.counts == (1, 17, 48)
        shifted = part._replace(call=lambda w, *rows, part=part: part.call(w[:, ::-1], *rows))
        monkeypatch.setattr(ops, "ops_of", lambda _, of=(part, shifted): iter(of))
        found = ops.check_ops(models_of(*["cpu"] * 5), lambda _: None)
        assert found["differences"] == 0 and found["ops"][0]["compared_rows"] == 66
        assert found["planted"]["differing_rows"] == 66
