"""Variants of drafters that jflash does not compute: each is refused by its name, at both levels.

Values that say what is computed anyway are accepted.
"""

import shutil
from pathlib import Path

import pytest

from jflash.io import open_checkpoint
from jflash.io.checkpoint import HUB_FILES
from jflash.io.families import variants
from jflash.io.hf_config import drafter_config
from jflash.io.load import load_drafter
from tests.io.test_hf_config import published
from tests.io.test_windowed_config import MIXED, windowed

CASES = Path(__file__).parents[1] / "reference" / "cases"
FULL = published("Qwen3-4B")
WINDOWS = FULL | {"layer_types": ["sliding_attention"] * 5, "use_sliding_window": True}
WINDOWS |= {"sliding_window": 2048}
BOTH = FULL | MIXED  # some layers have a window
LEVELS = {"top": "", "nested": " in dflash_config"}


def saying(raw: dict, level: str, own: dict) -> dict:
    """A config with the keys of `own` at one of its levels."""
    return raw | (own if level == "top" else {"dflash_config": raw["dflash_config"] | own})


REFUSED = [
    (FULL, {"use_swa": True}, "use_swa True", "say windows at the top level, by layer_types"),
    (FULL, {"use_swa": True, "swa_window_size": 1024}, "use_swa True", "say windows"),
    (BOTH, {"use_swa": True}, "use_swa True", "say windows"),
    (FULL, {"use_swa": "yes"}, "use_swa 'yes'", "say windows"),
    (WINDOWS, {"swa_window_size": 1024}, "swa_window_size 1024", "say windows at the top level"),
    (BOTH, {"swa_window_size": [2048]}, "swa_window_size [2048]", "say windows"),
    (FULL, {"causal": True}, "causal True", "say it at the top level, by is_causal"),
    (WINDOWS, {"causal": False}, "causal False", "say it at the top level, by is_causal"),
    (BOTH, {"causal": True}, "causal True", "by is_causal, for all layers"),
    (BOTH, {"causal": False}, "causal False", "by is_causal, for all layers"),
    (FULL | {"is_causal": True}, {"causal": False}, "causal False", "by is_causal"),
    (FULL, {"attention_sink_bias": True}, "attention_sink_bias True", "sinks of drafters"),
    (FULL, {"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias True", "sinks of"),
    (FULL, {"attention_value_scale": 0.707}, "attention_value_scale 0.707", "multiply v_proj"),
    (FULL, {"is_neox_style": False}, "is_neox_style False", "heads that turn by halves"),
    (FULL, {"rope_is_neox_style": False}, "rope_is_neox_style False", "heads that turn by halves"),
    (FULL, {"projector_type": "domino"}, "projector_type 'domino'", "only plain DFlash drafts"),
    (FULL, {"sample_from_anchor": True}, "sample_from_anchor True", "only plain DFlash drafts"),
    (FULL, {"shift_label": True}, "shift_label True", "only plain DFlash drafts"),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("raw", "own", "named", "instead"), REFUSED)
def test_each_variant_is_refused_by_its_name(raw, own, named, instead, level):
    drafter_config(raw)
    with pytest.raises(ValueError) as error:
        drafter_config(saying(raw, level, own))
    text = str(error.value)
    assert text.startswith(f"{named}{LEVELS[level]}: ") and instead in text
    assert "\n" not in text


def test_every_key_has_a_refusal():
    assert {key for _, own, _, _ in REFUSED for key in own} == {*variants.KEYS}


PLAIN = {"attention_sink_bias": False, "add_swa_attention_sink_bias": False}
PLAIN |= {"attention_value_scale": 1.0, "is_neox_style": True, "rope_is_neox_style": True}
PLAIN |= {"projector_type": "dflash", "sample_from_anchor": False, "shift_label": False}
COMPUTED = [
    (FULL, PLAIN | {"use_swa": False, "causal": False}),
    (FULL, {"use_swa": False, "swa_window_size": 1024}),  # no layer has that window
    (WINDOWS, PLAIN | {"use_swa": True, "swa_window_size": 2048, "causal": True}),
    (WINDOWS | {"is_causal": False}, {"use_swa": True, "causal": False}),
    (BOTH, PLAIN | {"use_swa": False, "swa_window_size": 2048}),
    (FULL | {"is_causal": True}, {"causal": True}),
    (FULL, dict.fromkeys(variants.KEYS)),
    (BOTH, dict.fromkeys(variants.KEYS)),
    (windowed("Gemma-4-31B"), PLAIN),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("raw", "own"), COMPUTED)
def test_what_is_computed_anyway_changes_nothing(raw, own, level):
    assert drafter_config(saying(raw, level, own)) == drafter_config(raw)


def speculator(layer: dict, **own) -> dict:
    """A config of the speculators library, whose layers' config has the keys of `layer` too."""
    raw = {key: value for key, value in FULL.items() if key != "dflash_config"}
    return {
        "speculators_model_type": "dflash",
        "transformer_layer_config": raw | layer,
        "aux_hidden_state_layer_ids": [2, 10],
        "mask_token_id": 3,
    } | own


@pytest.mark.parametrize(("raw", "own", "named", "instead"), [x for x in REFUSED if x[0] is FULL])
def test_drafters_of_the_speculators_library_likewise(raw, own, named, instead):
    want = drafter_config(speculator({}))
    assert drafter_config(speculator(PLAIN)) == drafter_config(speculator({}, **PLAIN)) == want
    for refused in (speculator(own), speculator({}, **own)):
        with pytest.raises(ValueError, match=f"{named.split()[0]} .*") as error:
            drafter_config(refused)
        assert "\n" not in str(error.value)


def test_a_mask_row_of_the_drafters_own(tmp_path):
    folder = shutil.copytree(CASES / "pair02" / "drafter", tmp_path / "drafter")
    load_drafter(folder, "float32")
    file = folder / "mask_embedding.pt"
    file.write_bytes(b"row")
    for read in (load_drafter, lambda x: open_checkpoint(x).config(drafter_config)):
        with pytest.raises(ValueError) as error:
            read(folder)
        assert str(error.value).startswith(f"{file}: a drafter's own mask embedding is not supp")
    assert file.name in HUB_FILES  # of a hub id it is fetched, so that it is seen
