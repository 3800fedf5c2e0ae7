"""Whole texts of a target kept as codes: what is compared, and what is caught."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.devices.backends import with_backends
from jflash.proof import kept_forms
from jflash.proof.kept_forms import as_arrays_and_codes, check_kept, with_another_code
from jflash.proof.law.forms import OWN, Way
from jflash.proof.law.text import law_failures
from pallas_kernels.matmul.kept.fragments import Fragments, fragments
from pallas_kernels.matmul.kept.quantised import Quantised, dequantised
from tests.support.attention_checks import ON_GPU
from tests.support.lossless_case import small_case


@pytest.mark.skipif(ON_GPU, reason="these are a CPU's operations")
def test_codes_decode_the_arrays_text_and_a_fault_is_caught(monkeypatch):
    case = small_case()
    case = case._replace(models=with_backends(case.models, "float32", jax.devices()[0]))
    monkeypatch.setattr(kept_forms, "FORMS", ("int4",))
    monkeypatch.setattr(kept_forms, "WAYS", (kept_forms.REFERENCE, Way(8, 2, OWN)))
    monkeypatch.setattr(kept_forms, "CPU_TOKENS", 12)
    [found] = check_kept(case, 0, "float32")
    assert not list(law_failures(found)) and found["tokens"] == 24
    assert [each["compared_tokens"] > 24 for each in found["compared"]] == [True, True]
    # Codes that are not those of the arrays are seen, whatever decodes them.
    arrays, codes = as_arrays_and_codes(case, "int4", 0)
    wrong = codes._replace(params=with_another_code(codes.params))
    monkeypatch.setattr(kept_forms, "as_arrays_and_codes", lambda *_: (arrays, wrong))
    [found] = check_kept(case, 0, "float32")
    assert any("is not plain decoding's" in line for line in law_failures(found))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("order", [lambda w: w, fragments])
def test_one_code_alone_is_turned(packed, order):
    draw = np.random.default_rng(0).integers(0, 7, (128, 64))
    codes = jnp.asarray(draw, jnp.uint8 if packed else jnp.float8_e4m3fn)
    kept = Quantised(codes, jnp.ones((codes.shape[0] * (1 + packed) // 128, 64)), None, 128)
    before = {"a": jnp.ones(3), "b": order(kept), "c": order(kept)}
    after = with_another_code(before)
    turned = jax.tree.map(lambda x, y: int((x != y).sum()), before, after)
    assert sum(jax.tree.leaves(turned["b"])) == 1 and not sum(jax.tree.leaves(turned["c"]))
    assert turned["a"] == 0 and isinstance(after["b"], Quantised | Fragments)
    assert dequantised(kept, "float32").shape == (128 * (1 + packed), 64)
