"""Losses, one per file. Each is a pure function of per-token log-probs and a packed batch.

It returns (sum, denominator, metrics): the unreduced sum, what it is to be divided by once per optimizer step, and
metrics as (sum, count) pairs. Nothing is divided before the end, so any split into micro-batches agrees.
"""
