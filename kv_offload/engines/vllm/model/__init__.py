"""A model's KV cache for the plugin: tensors, cache groups, unsupported kinds."""
