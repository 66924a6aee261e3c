"""Derivatives: `jax.grad`, `jax.vjp`, custom rules and rematerialization over named tensors."""
