from kv_offload.tools.doctor.report import COLUMNS, Check, as_text, not_checked

FINE = Check("Python", "ok", "3.12", "3.11 or newer")
SLOW = Check("link", "warning", "x4", "x16", "Reseat the card.")
BAD = Check("vLLM", "problem", "0.25", "0.26", "Install another.")
UNSEEN = not_checked("GPU", "no driver answers", "Install one.")


def test_every_line_says_what_was_found_what_is_needed_and_what_to_do():
    assert as_text("doctor", {"One": [FINE, SLOW], "Two": [BAD, BAD, UNSEEN]}).split("\n") == [
        "doctor",
        "",
        "One",
        "  ok           Python: 3.12 (needed: 3.11 or newer)",
        "  warning      link: x4",
        "               needed: x16",
        "               to do: Reseat the card.",
        "",
        "Two",
        *[
            "  problem      vLLM: 0.25",
            "               needed: 0.26",
            "               to do: Install another.",
        ]
        * 2,
        "  not checked  GPU: no driver answers",
        "               to do: Install one.",
        "",
        "1 ok, 1 warning, 2 problems, 1 not checked",
    ]


def test_colour_does_not_change_the_width():
    long = {"One": [Check("n", "problem", "word " * 60, "w" * 300, "r " * 99)]}
    plain, coloured = as_text("doctor", long), as_text("doctor", long, colour=True)
    assert max(map(len, plain.splitlines())) <= COLUMNS
    assert "\033[31mproblem    \033[0m" in coloured
    assert coloured.replace("\033[31m", "").replace("\033[0m", "") == plain
