"""The embedded engine: a JAX server of one policy, in process or over HTTP with SGLang's endpoints."""
