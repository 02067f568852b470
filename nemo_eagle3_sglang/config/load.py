"""From a YAML file and ``--key.sub=value`` overrides to a checked :class:`~nemo_eagle3_sglang.config.schema.Config`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from nemo_eagle3_sglang.config import problems, values
from nemo_eagle3_sglang.config.schema import Config
from nemo_eagle3_sglang.errors import ConfigError

_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
_PATH_OPTIONS = ("--config", "-c")  # AutoModel's name for the YAML, which callers take out themselves


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, dict[str, Any]]:
    """Read ``path``, apply ``overrides`` and check the result.

    Args:
        path: YAML file.
        overrides: ``key.sub=value`` each, or command-line arguments as :func:`parse_overrides` takes them.

    Returns:
        The checked configuration, and the merged mapping for AutoModel's ``ConfigNode``. The mapping still holds
        ``${VAR}`` where the YAML does: ``ConfigNode`` replaces it, and keeps secrets out of what it saves and prints.

    Raises:
        ConfigError: Names every problem.
    """
    given = parse_overrides(overrides)
    try:
        merged = _merge(_read_yaml(Path(path)), given)
        unset: list[str] = []
        read = values.read(merged, "", unset)
        if unset:
            raise _failure(unset)
        return validate(read), merged
    except RecursionError:
        raise ConfigError(f"{path}: a YAML alias (*name) refers to the section that it stands in.") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def validate(mapping: Mapping[str, Any]) -> Config:
    """Check a mapping whose values are already as AutoModel reads them, such as ``ConfigNode.to_dict()``.

    Raises:
        ConfigError: Names every problem, one a line.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"a configuration is a mapping of sections, not {type(mapping).__name__}.")
    try:
        config = Config.model_validate(dict(mapping))
    except ValidationError as error:
        raise _failure(problems.explain(error)) from None
    if found := problems.conflicts(config):
        raise _failure(found)
    return config


def parse_overrides(argv: Sequence[str]) -> list[str]:
    """Return ``key.sub=value`` for each override among command-line arguments, in the forms that AutoModel takes.

    These are ``--key.sub=value``, ``--key.sub value`` and a bare ``--key.sub`` for true; ``key.sub=value`` stays as it
    is, and ``--config PATH`` is passed over.

    Raises:
        ConfigError: An argument is none of these.
    """
    found, position = [], 0
    while position < len(argv):
        token, *rest = argv[position : position + 2]
        has_value = bool(rest) and not rest[0].startswith("--")
        takes_value = has_value and "=" not in token and token.startswith("-")
        if token not in _PATH_OPTIONS:
            found.append(_override(token, rest[0] if takes_value else "True"))
        position += 2 if takes_value else 1
    return found


def _override(token: str, value: str) -> str:
    text = token.lstrip("-") if token.startswith("--") else token
    key, equals, given = text.partition("=")
    given = given if equals else value
    if not _KEY.fullmatch(key) or (not equals and not token.startswith("--")):
        raise ConfigError(f"{token!r} is not an override; write --section.key=value.")
    if not given:
        raise ConfigError(f"{token!r} gives no value; write --{key}=None for null, or --{key}=\"''\" for empty text.")
    return f"{key}={given}"


class _Loader(yaml.SafeLoader):
    """YAML as AutoModel reads it, except that a key given twice is an error and a date stays text."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    text = f"key {key.value!r} is given twice, first in line {lines[key.value]}"
                    raise yaml.composer.ComposerError(None, None, text, key.start_mark)
                lines[key.value] = key.start_mark.line + 1
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _read_yaml(path: Path) -> dict[Any, Any]:
    text = _read_text(path)
    try:
        data = yaml.load(text, Loader=_Loader)  # a SafeLoader: it makes plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else "somewhere"
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}.") from None
    if data is None:
        raise ConfigError("the file is empty; write at least recipe, recipe_args and optimizer.")
    if not isinstance(data, dict):
        raise ConfigError(f"holds a {type(data).__name__}, not a mapping of sections such as `recipe_args:`.")
    return data


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("no such file.") from None
    except IsADirectoryError:
        raise ConfigError("is a folder; name the YAML file in it.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text (byte {error.start}); is this the YAML file?") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}.") from None


def _merge(data: dict[Any, Any], overrides: Sequence[str]) -> dict[str, Any]:
    try:
        config = OmegaConf.create(_map_text(data, _hide))
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{error.full_key or 'a key'}: YAML that no configuration can hold (a set, an odd key)."
        ) from None
    for override in overrides:
        _apply(config, override)
    merged = _map_text(OmegaConf.to_container(config), _show)
    _switch_wandb(merged)
    return merged


def _apply(config: Any, override: str) -> None:
    key, _, text = override.partition("=")
    value = None if text == "null" else values.literal(text)
    if isinstance(value, str) and value.startswith(("[", "{")):
        raise ConfigError(f"--{override}: not a Python literal; quote the text in it, e.g. --{key}=\"['a', 'b']\".")
    try:
        OmegaConf.update(config, key, _map_text(value, _hide), merge=False, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError):
        raise ConfigError(f"--{override}: leads to no place in the configuration, or is no YAML value.") from None


def _switch_wandb(merged: dict[str, Any]) -> None:
    """Do as AutoModel's own parser does: ``wandb.enable`` switches the section off and never reaches wandb."""
    wandb = merged.get("wandb")
    if isinstance(wandb, dict) and not values.read(wandb.pop("enable", True), "wandb.enable", []):
        del merged["wandb"]


# OmegaConf has a meaning of its own for ${…}, and refuses AutoModel's ${VAR,default}. The braces are hidden from it
# behind a character of the private use area.
_HIDDEN = "\ue000{"


def _hide(text: str) -> str:
    return text.replace("${", _HIDDEN)


def _show(text: str) -> str:
    return text.replace(_HIDDEN, "${")


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key: _map_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_text(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _failure(found: Sequence[str]) -> ConfigError:
    if len(found) == 1:
        return ConfigError(found[0])
    return ConfigError("\n  ".join([f"{len(found)} problems:", *found]))
