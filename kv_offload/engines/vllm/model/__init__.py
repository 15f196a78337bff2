"""Describes a model's KV cache to the plugin: tensors, cache groups and identity."""
