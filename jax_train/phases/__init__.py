"""The phases of training, one per file: each has `run(config)`, which `launch.py` calls."""
