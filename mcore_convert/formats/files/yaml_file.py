"""YAML files: only mappings, read as data within limits; they can create nothing but plain values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.storage.sources import Limit, content_of
from mcore_convert.storage.views import open_error

if TYPE_CHECKING:
    import yaml

MAX_VALUES = 200_000  # after expanding aliases: a run's configuration has a thousand
MAX_DEPTH = 60


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML mapping of plain values; the targets of aliases are copied.

    Raises:
        UnreadableCheckpoint: the file is missing, not a YAML mapping, larger than its limit, or expands beyond limits.
    """
    import yaml

    try:
        text = content_of(path, Limit.SETTINGS)
    except OSError as error:
        raise open_error(path, error) from error
    try:
        content = _plain(yaml.load(text, _loader()), [MAX_VALUES], MAX_DEPTH)
    except yaml.YAMLError as error:
        raise UnreadableCheckpoint(f"`{path}` is not plain YAML: {' '.join(str(error).split())}") from error
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UnreadableCheckpoint(f"`{path}` is not a YAML file of plain values: {reason}") from error
    if not isinstance(content, dict):
        raise UnreadableCheckpoint(f"`{path}` is not a YAML mapping")
    return content


def _loader() -> type[yaml.SafeLoader]:
    import yaml

    class Loader(yaml.SafeLoader):
        """The safe loader without merge keys, each of which may double the size of its target."""

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
                raise yaml.constructor.ConstructorError(None, None, "a merge key `<<`", node.start_mark)
            twice = sorted({key for key in keys if keys.count(key) > 1}) if len(keys) != len(set(keys)) else []
            if twice:
                raise yaml.constructor.ConstructorError(None, None, f"`{twice[0]}` is there twice", node.start_mark)

    return Loader


def _plain(value: Any, left: list[int], depth: int) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"it has more than {MAX_VALUES:,} values")
    if depth == 0:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict):
        names = [key for key in value if not isinstance(key, str | int)]
        if names:
            raise ValueError(f"{names[0]!r} is no name")
        return {key: _plain(each, left, depth - 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each, left, depth - 1) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)  # a date, such as a run's name may look like


def yaml_text(content: dict[str, Any]) -> str:
    """Return a YAML file of plain values, with sorted keys as Megatron-Bridge writes it."""
    import yaml

    return str(yaml.safe_dump(content))
