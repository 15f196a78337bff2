from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_offload.config.sizes import UNITS, format_size, parse_size

GIB = 1 << 30
UNIT_BYTES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def test_units_are_those_of_the_oracle():
    assert set(UNITS) == set(UNIT_BYTES)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("48GiB", 48 * GIB),
        ("48 GB", 48 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 * GIB // 2),
        ("4Gi", 4 * GIB),
        ("512Mi", 512 << 20),
        ("1gib", GIB),
        ("1GIB", GIB),
        ("1Gb", 10**9),
        ("  2 TiB ", 2 << 40),
        ("7B", 7),
        ("1.9B", 1),
        ("40%", 400 * GIB),
        ("12.5 %", 125 * GIB),
        ("0.4%", 4 * GIB),
        ("0.0001%", 1073741),
        ("250%", 2500 * GIB),
    ],
)
def test_sizes_that_are_accepted(text, size_bytes):
    assert parse_size(text, whole_bytes=1000 * GIB) == size_bytes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a positive number and a unit"),
        ("GiB", "not a positive number and a unit"),
        ("-1GiB", "not a positive number and a unit"),
        ("+1GiB", "not a positive number and a unit"),
        (".5GiB", "not a positive number and a unit"),
        ("1.GiB", "not a positive number and a unit"),
        ("1,5GiB", "not a positive number and a unit"),
        ("1e9B", "not a positive number and a unit"),
        ("1 GiB 2", "not a positive number and a unit"),
        ("1\N{KELVIN SIGN}iB", "not a positive number and a unit"),
        ("\N{ARABIC-INDIC DIGIT THREE}GiB", "not a positive number and a unit"),
        ("nan%", "not a positive number and a unit"),
        ("48", "the unit is missing, write 48GiB, 48% or 48B"),
        ("1.5", "the unit is missing, write 1.5GiB or 1.5%"),
        ("101.5", "the unit is missing, write 101.5MiB"),
        ("4096", "the unit is missing, write 4096MiB or 4096B"),
        ("1048576", "the unit is missing, write 1048576B"),
        ("9" * 5000 + "GiB", "not a positive number and a unit"),
        ("48G", "unknown unit 'G', write 48GB or 48GiB"),
        ("1.5t", "unknown unit 't', write 1.5TB or 1.5TiB"),
        ("48Q", f"unknown unit 'Q', known are {', '.join(UNITS)} and %"),
        ("48Gib%", "unknown unit 'Gib%'"),
        ("48%%", "unknown unit '%%'"),
        ("48%GiB", "unknown unit '%GiB'"),
        ("0GiB", "less than one byte"),
        ("0%", "less than one byte"),
        ("0.5B", "less than one byte"),
        ("0.01%", "less than one byte"),
        ("40%", "that is 400 bytes here, less than 1 MiB (1048576 bytes)"),
    ],
)
def test_sizes_that_are_refused(text, reason):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_size(text, whole_bytes=1000)
    assert reason in str(caught.value)


@given(
    number=st.decimals(min_value=1, max_value=10**6, places=3),
    unit=st.sampled_from(sorted(UNIT_BYTES)),
    space=st.sampled_from(["", " "]),
    change_case=st.sampled_from([str, str.lower, str.upper]),
)
def test_any_number_and_unit_is_exact_to_the_byte(number, unit, space, change_case):
    text = change_case(f"{number}{space}{unit}")
    assert parse_size(text, whole_bytes=1) == int(Fraction(number) * UNIT_BYTES[unit])


@given(size_bytes=st.integers(1, 1 << 60))
def test_bytes_round_trip(size_bytes):
    assert parse_size(f"{size_bytes}B", whole_bytes=1) == size_bytes


@given(size_bytes=st.integers(1, 1 << 60))
def test_a_formatted_size_is_within_its_two_decimals(size_bytes):
    # Half of the last decimal, and the byte that the parser rounds down.
    assert abs(parse_size(format_size(size_bytes), 1) - size_bytes) <= 0.00501 * size_bytes + 1


@given(percent=st.integers(1, 100), whole_bytes=st.integers(100 << 20, 1 << 50))
def test_a_percentage_is_rounded_down(percent, whole_bytes):
    assert parse_size(f"{percent}%", whole_bytes) == whole_bytes * percent // 100


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (1, "1 B"),
        ((10**400) << 40, f"{10**400} TiB"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (100 * GIB, "100 GiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_formatted_sizes(size_bytes, text):
    assert format_size(size_bytes) == text
