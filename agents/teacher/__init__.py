"""The offline teacher: an OpenAI-compatible server of deterministic programs, one per role, that stands in for a model.

It understands no language: it answers from the JSON block that ends an agent's prompt, and as the policy it reads back
the questions that its own planner wrote. Every record that it helped to make names it in its provenance.
"""

MODEL_NAME = "astrolabe-teacher"
