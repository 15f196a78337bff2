"""What a layer with states keeps: Mamba 2, and gated delta nets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kv_offload.errors import ConfigError

MAMBA_2 = frozenset({"granitemoehybrid"})
DELTA_NETS = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
STATE_MODELS = MAMBA_2 | DELTA_NETS
"""Values of `model_type` whose states are known here."""

NAMED_TYPE = "mamba_ssm_dtype"
"""Where Qwen3.5 says in which type it keeps the recurrent state; others keep the model's type."""


@dataclass(frozen=True, slots=True)
class State:
    """The shape of one layer's state, over all tensor-parallel ranks.

    It is the last columns that the convolution reads, and a matrix for each head
    (`MambaStateShapeCalculator` in vLLM 0.32).
    """

    inner_channels: int
    """Channels of the convolution that the heads own."""
    groups: int
    """Groups of heads, each of which shares `group_channels` more."""
    group_channels: int
    columns: int
    heads: int
    head_numbers: int
    recurrent_bytes: int | None
    """Of a number in the matrices of the heads; None where it is that of the model's type."""

    def rank_bytes(self, ranks: int, number_bytes: int) -> int:
        """Return the bytes on one of `ranks`. Raises `ConfigError` if they cannot split it.

        A single group is copied to every rank.
        """
        for name, count in (("heads", self.heads), ("groups", self.groups)):
            if count % ranks and (name == "heads" or count > 1):
                raise ConfigError(
                    f"--tensor-parallel-size is {ranks}, and the states have {count} {name}: give "
                    f"a divisor of {count}"
                )
        groups = ranks if self.groups % ranks else self.groups
        channels = (self.inner_channels + groups * self.group_channels) // ranks
        numbers = self.heads // ranks * self.head_numbers
        return channels * self.columns * number_bytes + numbers * (
            self.recurrent_bytes or number_bytes
        )


def read_state(model_type: str, values: Mapping[str, Any], number: Callable[[str], int]) -> State:
    """Return the state of a model of `STATE_MODELS`; `number` reads one of its file."""
    if model_type in MAMBA_2:
        return State(
            inner_channels=number("mamba_expand") * number("hidden_size"),
            groups=number("mamba_n_groups"),
            group_channels=2 * number("mamba_d_state"),
            columns=number("mamba_d_conv") - 1,
            heads=number("mamba_n_heads"),
            head_numbers=number("mamba_d_head") * number("mamba_d_state"),
            recurrent_bytes=None,
        )
    key_size, value_size = number("linear_key_head_dim"), number("linear_value_head_dim")
    heads = number("linear_num_value_heads")
    is_float32 = model_type != "qwen3_next" and values.get(NAMED_TYPE) == "float32"
    return State(
        inner_channels=heads * value_size,
        groups=number("linear_num_key_heads"),
        group_channels=2 * key_size,
        columns=number("linear_conv_kernel_dim") - 1,
        heads=heads,
        head_numbers=value_size * key_size,
        recurrent_bytes=4 if is_float32 else None,
    )
