"""Architectures that are not converted, with the reason for the refusal: mostly, Megatron-LM has no arguments for them.

Facts are from the modeling code of transformers 5.23, and from `TransformerConfig` and `arguments.py` of Megatron-LM
0.16.1.
"""

PARALLEL = "attention and MLP run side by side on one residual stream, and Megatron Core has them one after the other"
ALIBI = "ALiBi positions, which Megatron Core has not"
AFTER = "norms after attention and MLP, which Megatron Core has not"
EMBEDDING = "the embedding is multiplied by sqrt(hidden_size), and the MLP is gated by gelu: Megatron-LM has neither"
MULTIPLIERS = "multipliers of embeddings and residuals, which Megatron-LM has not"
STATE = "state-space layers, which a `GPTModel` has not"
LATENT = "multi-latent attention without experts, which no family describes yet"
MIXED = "layers with a window among layers without one, which no family describes yet"
TOWER = "a vision tower; its text model is converted once transformers has saved it by itself"
ELSEWHERE = "its code is not in transformers, so that nothing proves a conversion"

UNREPRESENTED = {
    "ApertusForCausalLM": "the activation xIELU, with weights of its own",
    "BaichuanForCausalLM": ELSEWHERE,
    "BambaForCausalLM": STATE,
    "BioGptForCausalLM": "the embedding is multiplied by sqrt(hidden_size), and positions are shifted by two",
    "BitNetForCausalLM": "norms within attention and MLP, before their last matrix",
    "BloomForCausalLM": f"{ALIBI}; a norm after the embedding",
    "ChatGLMModel": ELSEWHERE,
    "CodeGenForCausalLM": PARALLEL,
    "Cohere2ForCausalLM": f"{PARALLEL}; scaled logits",
    "CohereForCausalLM": f"{PARALLEL}; scaled logits",
    "CwmForCausalLM": MIXED,
    "DiffLlamaForCausalLM": "attention is the difference of two",
    "Exaone4ForCausalLM": f"{AFTER}, and none before them",
    "FalconForCausalLM": f"{PARALLEL}; or ALiBi positions",
    "FalconH1ForCausalLM": STATE,
    "FalconMambaForCausalLM": STATE,
    "GPTJForCausalLM": PARALLEL,
    "GPTNeoForCausalLM": "scores of attention that are not scaled, and layers that see a local window",
    "Gemma2ForCausalLM": f"{AFTER}; soft caps; {EMBEDDING}",
    "Gemma3ForCausalLM": f"{AFTER}; rotary bases that differ by layer; {EMBEDDING}",
    "Gemma3ForConditionalGeneration": f"{AFTER}; rotary bases that differ by layer; {EMBEDDING}",
    "Gemma3nForCausalLM": f"{AFTER}; embeddings for each layer; {EMBEDDING}",
    "GemmaForCausalLM": EMBEDDING,
    "Glm4ForCausalLM": f"{AFTER}, beside those before them",
    "HunYuanDenseV1ForCausalLM": "norms of queries and keys after rotation, and Megatron Core has them before",
    "HyperCLOVAXForCausalLM": f"{AFTER}; {MULTIPLIERS}",
    "InternLM2ForCausalLM": ELSEWHERE,
    "InternLMForCausalLM": ELSEWHERE,
    "Lfm2ForCausalLM": "convolutions among the layers",
    "MPTForCausalLM": ALIBI,
    "Mamba2ForCausalLM": STATE,
    "MambaForCausalLM": STATE,
    "MiniCPM3ForCausalLM": MULTIPLIERS,
    "MiniCPMForCausalLM": MULTIPLIERS,
    "MinistralForCausalLM": MIXED,
    "MptForCausalLM": ALIBI,
    "NanoChatForCausalLM": "norms without weights, queries and keys normed after rotation, soft caps",
    "OPTForCausalLM": "the activation ReLU, and learned positions that are shifted by two",
    "Olmo2ForCausalLM": f"{AFTER}, and none before them; norms of queries and keys over all heads at once",
    "Olmo3ForCausalLM": f"{AFTER}, and none before them; norms of queries and keys over all heads at once",
    "OlmoeForCausalLM": "norms of queries and keys over all heads at once, and those of Megatron Core are of each head",
    "OlmoForCausalLM": "LayerNorms without weights, and those of Megatron Core have weights, which training moves",
    "OpenAIGPTLMHeadModel": "norms of the residual stream itself, after each addition",
    "PhiForCausalLM": PARALLEL,
    "QWenLMHeadModel": ELSEWHERE,
    "Qwen3_5ForConditionalGeneration": TOWER,
    "Qwen3_5MoeForConditionalGeneration": TOWER,
    "RecurrentGemmaForCausalLM": f"recurrent layers; {EMBEDDING}",
    "RwkvForCausalLM": "recurrent layers",
    "VaultGemmaForCausalLM": f"soft caps; {EMBEDDING}",
    "XGLMForCausalLM": "sinusoidal positions, and the embedding is multiplied by sqrt(hidden_size)",
    "YoutuForCausalLM": LATENT,
    "Zamba2ForCausalLM": STATE,
    "ZambaForCausalLM": STATE,
}
