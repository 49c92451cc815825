"""The nano policy: a Qwen3-form decoder of about 1.5 million parameters that learns on a laptop's CPU.

`tokenizer` makes its vocabulary from the project's own texts, `init` its first weights, `corpus` its training episodes
out of made-up worlds, and `base` trains the checkpoint that the demo starts from.
"""
