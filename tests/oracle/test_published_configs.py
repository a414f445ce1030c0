"""Published `config.json` files: each converts, or is refused for a reason that is true.

`fixtures/published_configs.json` has them key by key as they were published, where they can be read, and in `refused`
what the family that reads one cannot represent of it. What a family represents is compared with what transformers makes
of the file.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoConfig

from mcore_convert.checkpoints import families
from mcore_convert.errors import ConfigError
from mcore_convert.spec.config.arguments import normalise
from tests.kinds import ROOT

PUBLISHED: list[dict[str, Any]] = json.loads((ROOT / "fixtures/published_configs.json").read_text())
# Of transformers' configurations: what a model is, in the words that all classes have.
SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
}


def test_the_list_is_long_and_says_where_each_is_from() -> None:
    assert len(PUBLISHED) >= 30
    assert all(entry["name"] and entry["source"] for entry in PUBLISHED)
    assert len({entry["name"] for entry in PUBLISHED}) == len(PUBLISHED)


@pytest.mark.parametrize("entry", PUBLISHED, ids=lambda entry: entry["name"])
def test_a_published_configuration_converts_or_is_refused_for_a_true_reason(entry: dict[str, Any]) -> None:
    config = entry["config"]
    [architecture] = config["architectures"]
    if not any(architecture in family.architectures for family in families.families().values()):
        with pytest.raises(ConfigError, match=architecture):
            families.of_config(config)
        return
    family = families.of_config(config)
    refused = entry["refused"].get(family.name, [])
    if refused:
        with pytest.raises(ConfigError) as caught:
            family.config.to_megatron(config)
        assert len(caught.value.items) == len(refused), caught.value.items
        assert all(reason in line for reason, line in zip(refused, caught.value.items, strict=True))
        return
    args = family.config.to_megatron(config)
    theirs = AutoConfig.for_model(**{"model_type": "gpt2", **config})
    assert {name: args[ours] for name, ours in SIZES.items()} == {name: getattr(theirs, name) for name in SIZES}
    assert args["num_query_groups"] == getattr(theirs, "num_key_value_heads", theirs.num_attention_heads)
    assert args["untie_embeddings_and_output_weights"] is not theirs.tie_word_embeddings
    if args["position_embedding_type"] == "rope":
        assert args["rotary_base"] == theirs.rope_parameters["rope_theta"]
    back = family.config.to_hf(normalise(args))
    written = family.config.to_megatron(json.loads(json.dumps(back)))
    assert {name: value for name, value in written.items() if name in args} == args


def test_an_unknown_key_that_a_user_ignores_changes_nothing() -> None:
    entry = next(entry for entry in PUBLISHED if "internal_version" in entry["config"])
    config = entry["config"]
    family = families.of_config(config)
    without = {key: value for key, value in config.items() if key != "internal_version"}
    ignoring = family.config.ignoring(["internal_version"])
    assert ignoring.to_megatron(config) == family.config.to_megatron(without)
    merged, changes = ignoring.merge(config, normalise(ignoring.to_megatron(config)))
    assert (merged, changes) == (config, [])
    with pytest.raises(ConfigError, match="only an unknown key") as caught:
        family.config.ignoring(["internal_version", "rope_scaling", "quantization_config"])
    assert [line.split("`")[1] for line in caught.value.items] == ["rope_scaling", "quantization_config"]
