"""`kv-offload warm-up`: has a server compute or load prompts before its users ask for them."""
