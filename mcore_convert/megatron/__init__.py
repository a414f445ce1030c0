"""The only room that imports Megatron Core: a `GPTModel` from stored arguments, its weights, and its logits.

Importing this package imports neither torch nor Megatron Core; the functions in it do.
"""
