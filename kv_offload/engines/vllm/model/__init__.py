"""A model's KV cache as the plugin sees it: tensors, cache groups, unsupported kinds."""
