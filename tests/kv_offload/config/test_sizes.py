from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_offload.config.sizes import UNITS, describe_bytes, format_size, parse_size

GIB = 1 << 30
UNIT_BYTES = {
    **{unit: 1000**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB"))},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti"), start=1)},
}


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [
        ("48GiB", 48 * GIB),
        ("1Gb", 10**9),
        ("  2 TiB ", 2 << 40),
        ("1.9B", 1),
        ("12.5 %", 125 * GIB),
        ("0.0001%", 1073741),
        (1 << 20, 1 << 20),
    ],
)
def test_sizes_that_are_accepted(size, size_bytes):
    assert parse_size(size, whole_bytes=1000 * GIB) == size_bytes


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        *(
            (text, "not a positive number and a unit.")
            for text in ("", "GiB", "-1GiB", ".5GiB", "1,5GiB", "1e9B", "1 GiB 2", "nan%")
        ),
        ("1\N{KELVIN SIGN}iB", "not a positive number and a unit."),
        ("\N{ARABIC-INDIC DIGIT THREE}GiB", "not a positive number and a unit."),
        ("9" * 5000 + "GiB", "not a positive number and a unit."),
        ("48", "the unit is missing, write 48GiB or 48%."),
        ("1.5", "the unit is missing, write 1.5GiB or 1.5%."),
        ("101.5", "the unit is missing, write 101.5MiB."),
        ("1048576", "the unit is missing, write 1048576B."),
        ("48G", "unknown unit 'G', write 48GB or 48GiB."),
        ("48Q", f"unknown unit 'Q', known are {', '.join(UNITS)} and %."),
        ("48%GiB", "unknown unit '%GiB'"),
        ("0.5B", "less than one byte."),
        ("40%", "that is 400 bytes here, less than 1 MiB (1048576 bytes)"),
        (5000, "Did you mean 5000MiB?"),
        (-1, "less than 1 MiB (1048576 bytes), hardly one block."),
        (1.0, "a number with a fraction needs a unit."),
    ],
)
def test_sizes_that_are_refused(size, reason):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_size(size, whole_bytes=1000)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        ("40%", f"unknown unit '%', known are {', '.join(UNITS[:-1])} and {UNITS[-1]}."),
        ("48", "the unit is missing, write 48GiB."),
        (64, "Did you mean 64GiB?"),
    ],
)
def test_without_a_whole_there_is_no_share(size, reason):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_size(size, whole_bytes=None)
    assert str(caught.value).endswith(reason)
    assert parse_size("48GiB", whole_bytes=None) == 48 * GIB


@given(
    number=st.decimals(min_value=1, max_value=10**6, places=3),
    unit=st.sampled_from(sorted(UNIT_BYTES)),
    space=st.sampled_from(["", " "]),
    change_case=st.sampled_from([str, str.lower, str.upper]),
)
def test_any_number_and_unit_is_exact_to_the_byte(number, unit, space, change_case):
    text = change_case(f"{number}{space}{unit}")
    assert parse_size(text, whole_bytes=1) == int(Fraction(number) * UNIT_BYTES[unit])
    assert set(UNITS) == set(UNIT_BYTES)


@given(size_bytes=st.integers(1, 1 << 60))
def test_a_formatted_size_is_within_its_two_decimals(size_bytes):
    # Half of the last decimal, and the byte that the parser rounds down.
    assert abs(parse_size(format_size(size_bytes), 1) - size_bytes) <= 0.00501 * size_bytes + 1


def test_described_sizes_are_exact():
    assert [describe_bytes(1), describe_bytes(1023)] == ["1 byte", "1023 bytes"]
    assert describe_bytes(3 * GIB // 2) == "1.5 GiB (1610612736 bytes)"
