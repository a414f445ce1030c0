"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 with plain linear layers and multi-query attention."""

from typing import Any

from converters import gpt2
from mcore_convert.spec import QKV, ConfigMapping, Family, Fused, column, row, vary
from mcore_convert.spec.config.fields import gelu, inert
from mcore_convert.spec.config.mapping import Field, Refused, Values, shown


def heads() -> Field:
    """Return the field of query heads that divide the hidden size, with one key and one value head for all."""
    each = gpt2.heads()

    def to_megatron(config: Values) -> dict[str, Any]:
        if config["multi_query"] is not True:
            raise Refused(f"`multi_query` = {shown(config['multi_query'])}, only true is known")
        if config["num_key_value_heads"] not in (None, 1):  # transformers 5 writes both
            raise Refused(f"`num_key_value_heads` = {shown(config['num_key_value_heads'])} beside `multi_query`")
        args = each.to_megatron(config)
        return args | {"num_query_groups": 1, "group_query_attention": args["num_attention_heads"] != 1}

    def to_hf(args: Values) -> dict[str, Any]:
        if args.get("num_query_groups") != 1:
            raise Refused(f"`num_query_groups` = {args.get('num_query_groups')}, the family has 1")
        return {**each.to_hf({**args, "num_query_groups": args["num_attention_heads"]}), "multi_query": True}

    return Field({**each.hf, "multi_query": True, "num_key_value_heads": None}, each.megatron, to_megatron, to_hf)


CONFIG = ConfigMapping(
    "gpt_bigcode",
    ("GPTBigCodeForCausalLM",),
    vary.fields(
        gpt2.CONFIG.fields,
        heads(),
        gelu("activation_function", default="gelu_pytorch_tanh"),
        # precision of the softmax, kernels, and reserved keys of the first release
        inert(attention_softmax_in_fp32=True, scale_attention_softmax_in_fp32=True, validate_runner_input=True),
        inert(inference_runner=0, pre_allocate_kv_cache=False, max_sequence_length=None, max_batch_size=None),
        inert(pad_key_length=True),
    ),
)
M, H = gpt2.M, gpt2.H
ROWS = vary.weights(
    gpt2.FAMILY.weights,
    column(M + "self_attention.linear_qkv.weight", "qkv hidden", H + "attn.c_attn.weight", pack=Fused(QKV())),
    row(M + "self_attention.linear_proj.weight", "hidden heads", H + "attn.c_proj.weight"),
    column(M + "mlp.linear_fc1.weight", "ffn hidden", H + "mlp.c_fc.weight"),
    row(M + "mlp.linear_fc2.weight", "hidden ffn", H + "mlp.c_proj.weight"),
)
FAMILY = Family(
    "gpt_bigcode",
    ("GPTBigCodeForCausalLM",),
    CONFIG,
    ROWS,
    ignore=gpt2.FAMILY.ignore,
    optional_prefix=gpt2.FAMILY.optional_prefix,
    prevalence=20,
)
