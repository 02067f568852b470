"""Words for what is wrong with a configuration: a line each, with the key's path, its value and what to write."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.config.schema import OTHER_BACKEND_ARGS, Config, GpuJob, RecipeArgs, Section, sections
from nemo_eagle3_sglang.errors import did_you_mean

_LONGEST_VALUE = 60
_LONGEST_LIST = 16
_REMOVE = "unknown key; nothing reads it, remove it"
_UNREAD = ("seed", "rng")  # accepted in a stock YAML, so nothing to send anyone to

# Pydantic's error type -> our words; {example} is the key's example or default.
_WORDS = {
    "missing": "missing; write {key}: {example}",
    "int_type": "not a whole number; write e.g. {example}",
    "int_from_float": "not a whole number; write e.g. {example}",
    "float_type": "not a number; write e.g. {example}",
    "finite_number": "not a finite number; write e.g. {example}",
    "bool_type": "neither true nor false; write one of them, without quotes",
    "string_type": "not text (AutoModel takes what looks like a number for one, quoted or not); write e.g. {example}",
    "list_type": "not a list; write e.g. {example}",
    "dict_type": "not a section; write its keys below it, indented",
    "model_type": "not a section; write its keys below it, indented",
    "literal_error": "not one of the choices; write {expected}",
    "greater_than": "too small; write a value > {gt}",
    "greater_than_equal": "too small; write a value >= {ge}",
    "less_than": "too large; write a value < {lt}",
    "less_than_equal": "too large; write a value <= {le}",
    "invalid_key": "a key that is not text; write it in quotes",
}

# Where keys of other trainers and of AutoModel's other recipes are found here.
_OTHER_NAMES = {
    "batch_size": "recipe_args.micro_batch_size",
    "global_batch_size": "recipe_args.grad_accumulation_steps",
    "learning_rate": "optimizer.lr",
    "local_batch_size": "recipe_args.micro_batch_size",
    "max_length": "recipe_args.seq_length",
    "pretrained_model_name_or_path": "recipe_args.target_model_name_or_path",
    "seed": "recipe_args.shuffle_seed",
    "target_model_path": "recipe_args.target_model_name_or_path",
    "ttt_length": "recipe_args.ttt_steps",
}


def problem(path: str, value: Any, message: str) -> str:
    """Return the line for ``path``, which holds ``value``."""
    text = _shown(value)
    return f"{path}: {message}" if message.startswith(text) else f"{path} = {text}: {message}"


def explain(error: ValidationError) -> list[str]:
    """Return a line for each of pydantic's errors, in words of our own."""
    return [_line(item) for item in error.errors(include_url=False)]


def conflicts(config: Config) -> list[str]:
    """Return a line for each key that goes against another, as far as no file is needed to see it."""
    args = config.recipe_args
    found = [*_required_together(args), *_remote(args), *_jobs(args)]
    if args.parallel_drafting:
        found += _parallel_drafting(args)
    checkpoint = config.checkpoint
    if checkpoint is not None and checkpoint.checkpoint_dir is None and "checkpoint_dir" in checkpoint.model_fields_set:
        found.append(problem("checkpoint.checkpoint_dir", None, "AutoModel fails on null; leave the key out"))
    return found


def _required_together(args: RecipeArgs) -> Iterator[str]:
    if args.cached_target_path is None:
        for key in ("train_data_path", "seq_length"):
            if getattr(args, key) is None:
                yield f"recipe_args.{key}: missing; write {key}: {_example(RecipeArgs.model_fields[key])}"
    if args.ttt_steps is None and not args.parallel_drafting:
        yield "recipe_args.ttt_steps: missing; write ttt_steps: 4"


def _remote(args: RecipeArgs) -> Iterator[str]:
    backend = args.target_model_backend
    ours = backends.is_registered(backend)
    if backend == "remote" and not (args.remote_url or args.remote_urls or args.cached_target_path):
        yield "recipe_args.remote_urls: missing; target_model_backend 'remote' needs e.g. [http://127.0.0.1:8765]"
    if args.kv_pool == "auto" and args.sglang_args.get("max_total_tokens") is not None:
        yield (
            "recipe_args.kv_pool: auto sizes the pool, and sglang_args.max_total_tokens: "
            f"{args.sglang_args['max_total_tokens']} does too; remove one of them"
        )
    if args.target_prefetch_depth and backend != "remote" and not ours:
        yield problem("recipe_args.target_prefetch_depth", args.target_prefetch_depth, "only for 'remote'; write 0")


def _parallel_drafting(args: RecipeArgs) -> Iterator[str]:
    wanted = {
        "target_model_backend": "colocated",
        "cached_target_path": None,
        "packed_sequence_size": 0,
        "lk_loss_type": None,
    }
    for key, value in wanted.items():
        if getattr(args, key) != value:
            yield problem(
                f"recipe_args.{key}", getattr(args, key), f"not with parallel_drafting; write {_shown(value)}"
            )
    if args.mask_token_id is None:
        yield "recipe_args.mask_token_id: missing; parallel_drafting needs the id of a reserved token"


def _jobs(args: RecipeArgs) -> Iterator[str]:
    jobs: dict[str, GpuJob | None] = {"decode_eval": args.decode_eval, "regen": args.regen}
    for name, job in jobs.items():
        if job is not None and job.every_steps > 0 and job.cuda_visible_devices is None:
            yield f"recipe_args.{name}.cuda_visible_devices: missing; write a GPU that training does not use, e.g. 7"


def _line(item: Any) -> str:
    # Pydantic adds "[key]" where a key, not its value, is wrong.
    parts = [part for part in item["loc"] if part not in (OTHER_BACKEND_ARGS, "[key]")]
    if "[key]" in item["loc"]:
        item = {**item, "type": "invalid_key"}
    path = _path(parts)
    section, key = _section_of(parts)
    if item["type"] == "extra_forbidden":
        return problem(path, item["input"], _unknown(section, key))
    message = _message(item, key, _field(section, key))
    return f"{path}: {message}" if item["type"] == "missing" else problem(path, item["input"], message)


def _message(item: Any, key: str, field: FieldInfo | None) -> str:
    context = item.get("ctx", {})
    if item["type"] == "value_error":
        return str(context["error"])
    words = _WORDS.get(item["type"], "not valid here; write e.g. {example}")
    example = _example(field) if field is not None else "…"
    message = words.format(key=key, example=example, **context)
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        choices = [word.strip("',") for word in context["expected"].split() if "'" in word]
        message += did_you_mean(item["input"], choices)
    return message


def _unknown(section: str, key: str) -> str:
    known, elsewhere = sections()[section].yaml_keys(), _OTHER_NAMES | _keys_outside(section)
    if section == "recipe_args" and key.endswith("_args"):
        takers = [name.removesuffix("_args") for name in known if name.endswith("_args")]
        name = key.removesuffix("_args")
        return f"unknown key; no backend {name!r} takes options{did_you_mean(name, takers)}; {', '.join(takers)} do"
    if key in elsewhere:
        return f"unknown key; it belongs in {elsewhere[key]}"
    if near := did_you_mean(key, known):
        return f"unknown key{near}"
    if close := difflib.get_close_matches(key, elsewhere, n=1, cutoff=0.8):
        return f"unknown key; did you mean {elsewhere[close[0]]}?"
    return f"unknown key; the keys here are {', '.join(known)}" if len(known) <= _LONGEST_LIST else _REMOVE


def _keys_outside(section: str) -> dict[str, str]:
    """Return the path of every key of the other sections; of two paths of a key the first counts."""
    outside = {path: model for path, model in sections().items() if path != section and not issubclass(model, GpuJob)}
    return {
        key: f"{path}.{key}" if path else f"{key} at the top level"
        for path, model in reversed(outside.items())
        for key in model.yaml_keys()
        if key not in _UNREAD
    }


def _section_of(parts: list[Any]) -> tuple[str, str]:
    """Split a location into the closed section that holds it and the key inside that section."""
    known = sections()
    depth = max(n for n in range(len(parts)) if n == 0 or ".".join(map(str, parts[:n])) in known)
    return ".".join(map(str, parts[:depth])), str(parts[depth])


def _field(section: str, key: str) -> FieldInfo | None:
    model: type[Section] = sections()[section]
    return next((field for name, field in model.model_fields.items() if key in (name, field.alias)), None)


def _path(parts: Iterable[Any]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def _example(field: FieldInfo) -> str:
    if field.examples:
        return str(field.examples[0])
    return "…" if field.default is PydanticUndefined or field.default is None else _shown(field.default)


def _shown(value: Any) -> str:
    """Return ``value`` as the YAML spells it, as far as that is short."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
