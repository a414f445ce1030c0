"""Features that Megatron Core cannot represent are refused by their name in `config.json`, one line for each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fixtures.hf import CONFIGS
from fixtures.refused import REFUSED
from mcore_convert.checkpoints.families import families, of_config, unrepresented
from mcore_convert.errors import ConfigError


def config_of(name: str, change: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return {**config, **change}


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=[f"{case[0]}: {case[2]}" for case in REFUSED])
def test_one_feature_is_refused_by_its_name(name: str, change: dict[str, Any], message: str) -> None:
    family = of_config(config_of(name, {}))
    family.config.to_megatron(config_of(name, {}))
    with pytest.raises(ConfigError) as caught:
        family.config.to_megatron(config_of(name, change))
    assert message in str(caught.value)
    assert len(caught.value.items) == 1


def test_an_unknown_key_is_refused_by_every_family() -> None:
    for path in sorted(CONFIGS.glob("*.json")):
        with pytest.raises(ConfigError, match="`new_feature` = true"):
            of_config(config_of(path.stem, {})).config.to_megatron(config_of(path.stem, {"new_feature": True}))


@pytest.mark.parametrize("architecture", unrepresented())
def test_an_architecture_that_megatron_core_has_not_is_refused_with_the_reason(architecture: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of_config({"architectures": [architecture], "model_type": "x"})
    assert caught.value.items == (f"`{architecture}`: {unrepresented()[architecture]}",)


def test_no_family_reads_what_is_listed_as_unrepresented() -> None:
    read = {name for family in families().values() for name in family.architectures}
    assert not read & unrepresented().keys()
