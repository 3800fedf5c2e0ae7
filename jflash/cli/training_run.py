"""What train's options ask for: configs, prompts and weights, checked in this order."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from jflash.cli.command import Options
from jflash.cli.options.train import SECOND, drafter_form
from jflash.cli.options.values import option_name, refuse
from jflash.cli.training_data import read_held_out, read_prompts
from jflash.generate import Pair
from jflash.io import (
    Checkpoint,
    PairFiles,
    configure_pair,
    configure_target,
    default_dtype,
    load_weights,
    open_checkpoint,
    pair_models,
)
from jflash.io.hf_values import KINDS
from jflash.io.hf_write import to_hf_config
from jflash.memory import check_decoding
from jflash.models.decoder import Target
from jflash.records.config import Drafter2Config, DrafterConfig, second_version
from jflash.system.device import device_memory
from jflash.training.attention import training_backend
from jflash.training.data import Conversation
from jflash.training.drafter import (
    check_memory,
    check_sizes,
    check_trainable,
    default_mask_token_id,
    drafter_config_for,
)
from jflash.training.recipe import Objective
from jflash.training.records import split_held_out, without_held_out

KEYS = {"num_layers": "num_hidden_layers"}  # of a config.json, where the option has another name


class Prepared(NamedTuple):
    """The checked inputs of a training."""

    source: Checkpoint
    pair: Pair  # the target without a drafter
    config: DrafterConfig
    records: list[Conversation]
    held: list[Conversation]
    stops: list[int]

    @property
    def target(self) -> Target:
        return self.pair.models.target

    @property
    def params(self) -> Any:
        return self.pair.params.target

    def whole(self, free: bool = False) -> "Prepared":
        """With all of the target on one device: read again, if several have its parts.

        `free`: the parts are gone before that.
        """
        if self.pair.models.mesh is None:
            return self
        for part in jax.tree.leaves(self.pair.params) if free else ():
            part.delete()
        return self._replace(pair=load_weights(target_files(self.source), progress=True))


def target_files(source: Checkpoint, **shared: Any) -> PairFiles:
    """The target's, whose weights become arrays, since training multiplies by them."""
    dtype = default_dtype()
    return configure_pair(source, dtype=dtype, quantised="dequantised", **shared)


def prepare(args: Options) -> Prepared:
    """Configs, prompts and the target's weights; ValueError before a weight is read."""
    source = open_checkpoint(args.target)
    check_apart(source, args.output)
    target = configure_target(source)
    tokenizer = source.tokenizer() if source.has_tokenizer() else None
    stops = source.stop_ids(tokenizer)
    config = drafter_for(args, target, tokenizer)
    platform = jax.default_backend()
    named = args.training_attention  # refused here if it cannot run, before the answers
    training_backend(named, (target.config, config), default_dtype(), platform)
    check_sizes(target.config, args.row_length, args.anchors)
    check_memory(config, args.batch, args.row_length, device_memory())
    records = read_prompts(args, tokenizer, target, stops)
    held = read_held_out(args, tokenizer, target)
    if held:
        records = without_held_out(records, held)
    if args.eval_every and args.held_out and not held:
        split_held_out(records, args.held_out, args.seed)  # refuses too many, before the answers
    shared = {"tensor_parallel": args.tensor_parallel, "experts_over": args.experts_over}
    files = target_files(source, **shared)
    longest = max(len(r.prompt_ids) for r in records)
    check_decoding(files.models, args.answer_batch, longest, args.max_new_tokens)
    pair = load_weights(files, progress=True)
    return Prepared(source, pair, config, records, held, stops)


def check_apart(source: Checkpoint, output: Path) -> None:
    """ValueError if the drafter would be written over a checkpoint that its training reads."""
    if source.path.resolve() == output.resolve():
        raise ValueError(f"{source.path} is both read and written: choose another --output")


def drafter_for(args: Options, target: Target, tokenizer: Any) -> DrafterConfig:
    """The config of --init-from's drafter, or of a new one in the form of the options."""
    form = drafter_form(args)
    for name, value in form.items():  # what a config.json could not say would never be read again
        kind = KINDS.get(KEYS.get(name, name))
        wrong = kind is not None and value is not None and not kind.holds(value)
        refuse(wrong, f"{option_name(name)} {value}: {kind.words if kind else ''}")
    if args.init_from is not None:
        source = open_checkpoint(args.init_from)
        drafter = pair_models(args.target, source).drafter
        assert drafter is not None
        check_trainable(drafter.config)
        second = isinstance(drafter.config, Drafter2Config)
        if not second and args.selector_weight != Objective.selector_weight:
            raise ValueError(f"--selector-weight: {args.init_from} is of version 1, without one")
        to_hf_config(drafter.config, "bfloat16")  # refuses what could not be saved
        check_apart(source, args.output)
        source.check(drafter.config)
        return drafter.config
    if form["mask_token_id"] is None:
        mask = default_mask_token_id(tokenizer, target.config.vocab_size)
        name = {i: text for text, i in tokenizer.get_vocab().items()}.get(mask)
        print(f"mask token: id {mask}, " + (f"{name!r}" if name else "which the tokenizer lacks"))
        form["mask_token_id"] = mask
    version = form.pop("drafter")
    second = {name: form.pop(name) for name in SECOND}
    config = drafter_config_for(target.config, **form)
    return config if version == "dflash" else second_version(config, **second)
