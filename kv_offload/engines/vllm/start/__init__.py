"""What runs once, when vLLM builds a connector: it reads vLLM's configuration and builds a half."""
