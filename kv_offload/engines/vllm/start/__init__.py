"""What runs once, at the start of an engine.

- `command_line`, `early`: check the user's arguments before vLLM loads weights.
- `support`, `members`: what of the engine's settings stands in the way, also inside a
  MultiConnector. `engines.vllm.model` says it of the model.
- `ranks`: what the ranks tell each other, and how many replicas share the host.
- `build`: builds a half of the connector.
- `log`: what of all this is said in the log.
"""
