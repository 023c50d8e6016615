"""Reading answers: adversarial cases for every rule, and the golds of the real datasets if they are available."""

from __future__ import annotations

import doctest
import gzip
import json
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firedistill.tasks.answers import choices, numbers
from firedistill.tasks.answers.choices import choice_answer, lenient_choice_correct
from firedistill.tasks.answers.numbers import (
    count_normalized,
    count_numbers,
    find_numbers,
    lenient_numeric_correct,
    numeric_equal,
    numeric_gold,
    read_numeric,
)
from firedistill.tasks.answers.text import Answer

LABELS = "ABCDEFGHIJ"
OPTIONS = [
    "Different meaning",
    "Same meaning",
    "21.5",
    "a car",
    "-5",
    "5(√3 + 1)",
    "\\frac{1}{2}",
    "$61",
    "None of these",
    "x or y",
]
HUGE = 1_000_000


def numeric_correct(response, gold):
    return numeric_equal(read_numeric(response, gold).value, gold)


# One number

NUMBERS = {
    "plain": {
        "42": 42, " 42 ": 42, "0": 0, "-0": 0, "007": 7, "42.": 42, "42!": 42, "42,": 42, "42;": 42, "42:": 42, "42 -": 42,
    },
    "thousands": {
        "1,200": 1200, "1,234,567": 1234567, "100,000.50": "200001/2", "1{,}234": 1234, "1,\\!234": 1234, "1，200": 1200,
        "1\\,234": 1234, "\\boxed{1\\,234\\,567}": 1234567, "10\\ 000": 10000, "10\u00a0000": 10000, "10\u2009000": 10000,
        "10\u202f000.50": "20001/2",
    },
    "decimals": {
        "18.0": 18, "0.5": "1/2", ".5": "1/2", "-.5": "-1/2", "5.": 5, "3.14": "157/50", "0.10": "1/10", "1.50": "3/2",
    },
    "signs": {
        "+42": 42, "+ 42": 42, "-5": -5, "- 5": -5, "−5": -5, "–5": -5, "− 5": -5, "－5": -5, "$-5": -5, "-$5": -5, "- $ 5": -5,
        "x = -5": -5, "The answer is -5": -5, "(-5)": -5, "-(5)": -5, "-$5$": -5,
    },
    "currency": {
        "$42": 42, "42$": 42, "€ 42": 42, "£42.50": "85/2", "¥42": 42, "US$42": 42, "Rs.42": 42, "Rs. 42": 42, "42 €": 42,
    },
    "words and units": {
        "42 apples": 42, "about 42": 42, "~42": 42, "≈ 42": 42, "42km": 42, "42 km/h": 42, "5/hour": 5, "5 cm^2": 5, "5 cm²": 5,
        "5cm2": 5, "5 \\text{ cm}^2": 5, "5 cm^{2}": 5, "45°": 45, "45^\\circ": 45, "45^{\\circ}": 45, "45° C": 45, "No. 5": 5,
        "1st": 1, "The 60th caller.": 60, "42-year-old": 42, "42 apples, which is all": 42, "Answer: 42": 42, "#42": 42,
        "42个": 42,
        "the total, 42": 42, "H2O: 42": 42, "5m": 5, "24 hours/day": 24,
    },
    "fractions": {
        "1/2": "1/2", "-7/2": "-7/2", "4/2": 2, "7 / 2": "7/2", "0/5": 0, "1.5/2": "3/4", "1⁄2": "1/2", "-(1/3)": "-1/3",
        "(3)/(4)": "3/4", "3/4 cup": "3/4", "½": "1/2", "½ cup": "1/2", "1,000/3": "1000/3",
    },
    "mixed": {
        "1 1/2": "3/2", "-1 1/2": "-3/2", "1½": "3/2", "2\\frac{1}{4}": "9/4", "1,000 1/2": "2001/2",
        "1 1/2 cups": "3/2", "-1 2/3": "-5/3", "0 1/2": "1/2", "1 0/5": 1, "1\\frac{2}{3}": "5/3",
    },
    "percent": {"50%": 50, "50 %": 50, "50\\%": 50, "12.5%": "25/2", "50 percent": 50},
    "latex": {
        "\\frac{1}{2}": "1/2", "\\dfrac{1}{2}": "1/2", "\\tfrac{10}{4}": "5/2", "-\\frac{1}{2}": "-1/2",
        "\\frac{-1}{2}": "-1/2",
        "\\frac 34": "3/4", "\\frac3{4}": "3/4", "\\frac{3}4": "3/4", "\\frac{1}{-2}": "-1/2", "\\frac{1{,}000}{2}": "500/1",
        "\\frac12": "1/2", "\\frac{ 1 }{ 2 }": "1/2", "\\boxed{42}": 42, "\\boxed{\\frac{1}{2}}": "1/2", "$\\boxed{-42}$": -42,
        "\\boxed{\\text{42}}": 42, "$42$": 42, "$$42$$": 42, "\\(42\\)": 42, "\\[42\\]": 42, "\\$42": 42, "42\\,\\text{cm}": 42,
        "\\mathbf{42}": 42, "\\left(42\\right)": 42, "\\text{about } 42": 42, "\\fbox{42}": 42, "\\boxed{1,200}": 1200,
    },
    "markdown": {
        "**42**": 42, "*42*": 42, "__42__": 42, "`42`": 42, "***42***": 42, "**42": 42, "[42]": 42, "<b>42</b>": 42,
        "<42>": 42, "*42*.": 42,
    },
    "scientific": {
        "1e3": 1000, "1E3": 1000, "1.5e-2": "3/200", "1e+3": 1000, "1.5 x 10^3": 1500, "1.5 × 10^3": 1500, "2*10^3": 2000,
        "1.5 \\times 10^{-3}": "3/2000", "2 \\cdot 10^{2} m": 200, "1e0": 1,
    },
    "equations": {
        "6*7 = 42": 42, "40 + 2 = 42": 42, "x = 42": 42, "= 42": 42, "42 =": 42, "6*(3+4) = 42": 42, "1 km = 1000 m": 1000,
        "16 => 42": 42, "-> 42": 42, "f(3) = 42": 42, "6 × 7 = 42.": 42, "In total, 6*7 = 42": 42, "<<6*7=42>>42": 42,
        "2x = 42": 42,
    },
    "remarks": {
        "12 (3 groups of 4)": 12, "7 (apples)": 7, "7(apples)": 7, "42 (6*7=42)": 42, "42 (or 43)": 42, "42 (a (b) 3)": 42,
        "42 (open 3": 42, "42)": 42, "(42)": 42, "((42))": 42, "(3) 42": 42,
    },
    "full width": {
        "４２": 42, "－４２": -42, "１，２００": 1200, "６＊７＝４２": 42, "４．５": "9/2", "５０％": 50, "＄４２": 42,
        "４２　": 42,
    },
    "minus in words": {
        "minus 5": -5, "Negative 5": -5, "It is negative 1,200.5 dollars": "-2401/2", "x = minus 4": -4, "(minus 5)": -5,
        "minus 3/4": "-3/4", "negative 3 x 10^3": -3000,
    },
    "invisible": {
        "42\u200b": 42, "\u202e42": 42, "\ufeff42": 42, "4\u200d2": 42, "1\u00a0apple": 1, "42\u00a0": 42, "42\x00": 42,
    },
    "magnitudes": {
        "2 million": 2_000_000, "2.5 million dollars": 2_500_000, "-3 thousand": -3000, "5 hundred": 500, "$2.5bn": 2_500_000_000,
        "5 millions": 5_000_000, "2 billions": 2_000_000_000, "5 hundreds": 5,
        "3 Mio": 3_000_000, "2 mrd": 2_000_000_000, "5 lakh": 500_000, "2 crores": 20_000_000, "7 dozen": 7, "30 mn": 30, "5MB": 5,
    },
}  # fmt: skip
NO_NUMBERS = {
    "nothing": [
        "", " ", "\n", "forty-two", "Mrs. Hilt", "apples", "-", "+", ".", ",", "$", "####", "()", "\\frac", "\\boxed{}", "e3",
    ],
    "several": [
        "4 2", "10 or 42", "10 and 42", "42 dollars and 0 cents", "3 hours 20 minutes", "5 feet 3 inches", "10, 42", "2; 6",
        "42 6*7", "5 (apples) and 6 (pears)", "(10)(42)", "(2, 3)", "42. Or 43", "x = 3, y = 4", "10 to 20", "4\u00a02",
        "1_000",
        "10 000", "4\n2", "2 or 3 = 5", "42/43 44",
    ],
    "bad grouping": ["1,2", "1,2345", "12,34", "1,00,000", "0,500", "1234,567", "1,234,56", "1234\\,567", "12\\,34"],
    "ranges times ratios": ["10-20", "10 - 20", "10–20", "9:2", "11:30", "11:30 p.m.", "9 : 2", "2024-01-02", "6:01:00"],
    "division by zero": ["1/0", "0/0", "1/0.0", "1 1/0", "\\frac{1}{0}", "-1/0"],
    "no proper fraction": [
        "41 1/1", "41 2/2", "-41 1/1", "41\\frac{1}{1}", "1 -1/2", "1\\frac{3}{2}",
        "1 3/2", "1 1/2/3", "1/2/3", "1.5 1/2", "1 1.5/2", "4 1/2 1/3", "1-1/2", "1 2 1/2", "/2", "2/", "1/-2",
    ],
    "other bases": ["0x2A", "0X2a", "0xFF", "0b11", "0o17", "24a8"],
    "expressions": [
        "6*7", "6 * 7", "6+7", "16-3", "6*", "*6", "42 * x", "x * 42", "6*(3+4)", "2(3+4)", "(3+4)*6", "(3+4)2",
        "5 - (3)", "10^2",
        "8 minus 3", "minus -5", "-minus 5", "minus minus 5",
        "10**2", "2^10", "10²", "√16", "\\sqrt{16}", "2\\pi", "2π", "2x", "3n", "42 = 6*7", "x^42", "log 42", "42 ± 1", "|42|",
        "42!=", "1.5 x 10", "--42", "+-42", "- - 42", "\\frac{1+1}{2}", "a/42",
        "\\frac{x}{42}", "\\frac{42}{y}", "\\frac345", "\\frac{1}{2x}", "\\frac{1}{2\\sqrt{3}}", "\\frac{1}{2}^2",
    ],
    "inequalities": ["x < 42", "x <= 42", "42 > x", "x ≥ 42", "x \\leq 42", "x != 42", "x \\neq 42"],
    "fragments of words": ["x42", "USD42", "COVID-19", "A4", "v1.2.3", "1.2.3", "192.168.0.1", "5k", "42万", "4٢", "٤٢", "一"],
    "labels": ["Step 2", "Step 2: add the numbers", "2: add", "Part 3 of it", "Question 7"],
    "qualified": ["not 42", "half of 42", "2 and a half", "2 and √2"],
    "absurd": ["1e999999999", "1e-999999999", "1e" + "9" * 5000, "1 x 10^9999", "1 x 10^99999", "9" * 5000, "1/" + "9" * 5000],
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"), [pytest.param(t, v, id=f"{group}: {t!a}") for group, cases in NUMBERS.items() for t, v in cases.items()]
)
def test_one_number(text, value):
    """Normalized numbers are fractions where the text has one, and decimals elsewhere."""
    exact = Fraction(value)
    written_as_fraction = any(mark in text for mark in ("/", "⁄", "½", "frac"))
    gold = str(exact) if written_as_fraction else f"{Decimal(exact.numerator) / exact.denominator:f}"
    assert numeric_gold(text) == gold
    assert numeric_equal(str(exact), gold) and numeric_equal(gold, str(exact))
    assert read_numeric(f"Work: 1, 2.\n#### {text.strip()}", gold) == Answer(gold, True)
    assert numeric_correct(f"#### {text}", str(value)) and lenient_numeric_correct(f"#### {text}", str(value))


@pytest.mark.parametrize(
    "text", [pytest.param(text, id=f"{group}: {text[:40]!a}") for group, cases in NO_NUMBERS.items() for text in cases]
)
def test_no_single_number(text):
    response = f"#### {text}".replace("\n", " ")
    assert not any(numeric_correct(response, gold) for gold in ("42", "2", "20", "0", "1"))
    assert not read_numeric(response, "42").well_formed
    gold = numeric_gold(text)
    assert numeric_gold(gold) == gold


def test_examples_of_the_documentation():
    results = [doctest.testmod(module) for module in (choices, numbers)]
    assert sum(r.failed for r in results) == 0 and sum(r.attempted for r in results) >= 10


# Which part of a response is the answer

RESPONSES = {
    "last line": ("6 * 7 = 42\n#### 42", "42", True),
    "no space": ("####42", "42", True),
    "middle of a line": ("so #### 42", "42", True),
    "blanks": ("####   \t 42  \n\n", "42", True),
    "last of several": ("#### 41\n#### 42", "42", True),
    "two on a line": ("#### 41 #### 42", "42", True),
    "text after": ("#### 42\nThat is 6 bags of 7.", "42", True),
    "empty is skipped": ("#### 42\n####", "42", True),
    "blank is skipped": ("#### 42\n####   \n", "42", True),
    "markup is skipped": ("#### 42\n#### **", "42", True),
    "closing marker": ("#### 42 ####", "42", True),
    "not the next line": ("#### \n42", "42", False),
    "bold marker": ("**#### 42**", "42", True),
    "quoted marker": ("`#### 42`", "42", True),
    "windows line ends": ("#### 42\r\nmore 7\r\n", "42", True),
    "old mac line ends": ("#### 42\rmore 7", "42", True),
    "full-width marker": ("＃＃＃＃ ４２", "42", True),
    "unit": ("#### 42 apples", "42", True),
    "five signs": ("##### 42", "42", False),
    "three signs": ("### 42", "42", False),
    "three signs and four": ("#### 42\n### Check 7", "42", True),
    "heading, then answer": ("#### Step 1: add\n3\n#### 42", "42", True),
    "text": ("#### Mrs. Hilt", "mrs. hilt", True),
    "last number of last line": ("7 and 9\nThe answer is 42.\n\n", "42", False),
    "last of prose": ("First 7, then 42 apples", "42", False),
    "equation as last line": ("16-3=13", "13", False),
    "negative in prose": ("The answer is -5.", "-5", False),
    "mixed in prose": ("It is 1 1/2", "3/2", False),
    "currency in prose": ("He paid $1,200.50.", "1200.5", False),
    "trailing blank lines": ("It is 42.\n\n   \n", "42", False),
    "only the last line": ("It is 42.\nDone.", None, False),
    "time": ("It is 11:30", None, False),
    "range": ("It is 10-20", None, False),
    "perhaps thousands": ("It costs 72 000.", None, False),
    "perhaps millions": ("1 200 500 people", None, False),
    "a year and a number": ("In 2019 300 people", "300", False),
    "thin space": ("It costs $72\\,000$.", "72000", False),
    "hexadecimal": ("It is 0x2A", None, False),
    "nothing": ("no idea", None, False),
    "empty": ("", None, False),
    "only markers": ("####\n####", None, False),
}


@pytest.mark.parametrize(("response", "value", "well_formed"), RESPONSES.values(), ids=RESPONSES.keys())
def test_which_part_of_a_response(response, value, well_formed):
    assert read_numeric(response, value or "42") == Answer(value, well_formed)
    if value is not None:
        assert numeric_correct(response, value)


def test_a_heading_is_reported_but_is_not_an_answer():
    assert read_numeric("The sum is 2.\n#### Step 2: add", "2") == Answer("step 2: add", False)


def test_last_number_of_a_very_long_line():
    assert read_numeric("word " * 100_000 + "42", "42") == Answer("42", False)
    assert read_numeric("4" * 100_000 + " 42", "42") == Answer("42", False)
    assert read_numeric("4" * 100_000, "42") == Answer(None, False)


# Golds of several values, and of text

BY_GOLD = [
    ("2; 6", "2; 6", True),
    ("2; 6", "2, 6", True),
    ("2; 6", "2,6", True),
    ("2; 6", "2 and 6", True),
    ("2; 6", "2 (ft), and 6 (ft)", True),
    ("2; 6", "(2, 6)", True),
    ("2; 6", "$2$ and $6$", True),
    ("2; 6", "x = 2, y = 6", True),
    ("2; 6", "2 feet & 6 feet", True),
    ("2; 6", "\\boxed{2; 6}", True),
    ("2; 6", "6; 2", False),
    ("2; 6", "2", False),
    ("2; 6", "6", False),
    ("2; 6", "2; 6; 8", False),
    ("2; 6", "2 6", False),
    ("2; 6", "2 or 6", False),
    ("2; 6", "2:6", False),
    ("2; 6", "2-6", False),
    ("148; 296", "148,296", True),
    ("148; 296", "148, 296", True),
    ("1000; 4000", "1,000, 4,000", True),
    ("1000; 4000", "$1,000 and $4,000", True),
    ("7/2; 9/5", "3.5; 1.8", True),
    ("24; 120; 36", "24, 120 and 36", True),
    ("24; 120; 36", "24,120,36", True),
    ("148296", "148,296", True),
    ("2", "2; 6", False),
    ("6", "2; 6", False),
    ("42", "42; 0", False),
    ("42", "42, 42", False),
    ("9:2", "9:2", True),
    ("9:2", "9 : 2", True),
    ("9:2", "**9:2**", True),
    ("9:2", "$9:2$", True),
    ("9:2", "\\boxed{9:2}", True),
    ("9:2", "９：２", True),
    ("9:2", "2:9", False),
    ("9:2", "9/2", False),
    ("9:2", "4.5", False),
    ("9:2", "2", False),
    ("11:30", "11:30", True),
    ("11:30", "30", False),
    ("11:45 p.m.", "11:45 PM", True),
    ("11:45 p.m.", "11:45 p.m", True),
    ("11:45 p.m.", "11:45 a.m.", False),
    ("Mrs. Hilt", "mrs. hilt", True),
    ("Mrs. Hilt", "**Mrs.  Hilt.**", True),
    ("Mrs. Hilt", "Hilt", False),
    ("Cesar's toothbrush", "Cesar’s toothbrush", True),
    ("Yes", "yes.", True),
    ("Yes", "No", False),
    ("10-20", "10–20", True),
    ("10-20", "10 - 20", True),
    ("10-20", "20", False),
    ("The 60th caller.", "60", True),
    ("1st", "1st", True),
]


@pytest.mark.parametrize(("gold", "content", "right"), BY_GOLD, ids=lambda value: f"{value!a}")
def test_reading_by_gold(gold, content, right):
    gold = numeric_gold(gold)
    response = f"Work 5.\n#### {content}"
    assert numeric_correct(response, gold) is right
    answer = read_numeric(response, gold)
    assert numeric_equal(answer.value, gold) is right
    assert answer.well_formed or not right
    assert lenient_numeric_correct(response, gold) or not right


def test_several_values_submitted_for_one_are_reported():
    assert read_numeric("#### 42 dollars and 0 cents", "42") == Answer("42; 0", False)
    assert read_numeric("#### 10 or 42", "42") == Answer("10 or 42", False)
    assert read_numeric("#### 2", "2; 6") == Answer("2", False)


def test_reading_without_marker_by_gold():
    assert read_numeric("They are 2 and 6.", "2; 6") == Answer("2; 6", False)
    assert read_numeric("11:30", "11:30") == Answer("11:30", False)
    assert read_numeric("", "11:30") == Answer(None, False)


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("7 (apples)", "7"), ("14  (seats)", "14"), ("-(1/3)", "-1/3"), ("25/3", "25/3"), ("1,200", "1200"), ("2; 6", "2; 6"),
        ("8 (ft); 128 (sq. ft)", "8; 128"), ("36 (km); 4 (km/hour)", "36; 4"), ("3.5 (dollars); 1.8 (dollars)", "3.5; 1.8"),
        ("9:2", "9:2"), ("6:01:00 p.m.", "6:01:00 pm"), ("9:03:36 a.m.", "9:03:36 am"), ("Mrs. Hilt", "mrs. hilt"),
        ("11:55 p.m. on 24 December 2014.", "11:55 pm on 24 december 2014"), ("February 3rd", "3"), ("Vendor 2", "2"), ("", ""),
    ],
)  # fmt: skip
def test_golds(text, gold):
    assert numeric_gold(text) == gold
    assert numeric_gold(gold) == gold


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("42", "42", True), ("42", "42.0", True), ("1/2", "0.5", True), ("0.5", "1/2", True), ("1/0", "1/0", True),
        ("1/0", "2/0", False), ("9" * 5000, "9" * 5000, True), ("9" * 5000, "9" * 5001, False),
        ("1.5; 1/2", "3/2; 0.50", True),
        ("2; 6", "2; 6", True), ("6; 2", "2; 6", False),
        ("42", "41", False), ("42", "42; 42", False), (None, "42", False), (None, "", False), ("", "", False), ("1/3",
        "0.333", False),
        ("11:30", "11:30", True), ("42", "", False), ("10 or 42", "42", False),
    ],
)  # fmt: skip
def test_equality_is_exact(answer, gold, equal):
    assert numeric_equal(answer, gold) is equal


# Lenient reading

LENIENT = [
    ("so \\boxed{42}\nThat uses 3 bags.", "42", True),
    ("\\boxed{41}, no, \\boxed{\\frac{84}{2}} and 7 more words", "42", True),
    ("\\boxed{42", "42", True),
    ("The answer is 42 because 6 times 7 is that; I checked 3 times", "42", True),
    ("The final answer is: **42**. I used 6 bags of 7", "42", True),
    ("Answer: 42\nI used 6", "42", True),
    ("it makes 42\nNo more to say.", "42", True),
    ("#### so 6 * 7 gives 42", "42", True),
    ("The answer is $-5$. Yes 3", "-5", True),
    ("They are 2 and 6.\nDone.", "2; 6", True),
    ("The answer is 2 and 6, out of 9", "2; 6", True),
    ("The ratio is 9:2.", "9:2", True),
    ("\\boxed{9:2}\nDone", "9:2", True),
    ("It is 42.\nIt is 41.", "42", False),
    ("the answer is 41", "42", False),
    ("", "42", False),
    ("no number", "42", False),
    ("It is 142.", "42", False),
    ("19:2", "9:2", False),
]


@pytest.mark.parametrize(("response", "gold", "right"), LENIENT)
def test_lenient_reading(response, gold, right):
    assert lenient_numeric_correct(response, gold) is right


# Numbers for diagnostics


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []), ("no", []), ("16-3", ["16", "3"]), ("16 -3", ["16", "-3"]), ("-3", ["-3"]), ("(-3)", ["-3"]), ("x=-3",
        ["-3"]),
        ("1,234,567 and 1,2", ["1,234,567", "1", "2"]), ("1,2345", ["1", "2345"]), ("3.14.", ["3.14"]), (".5", [".5"]),
        ("...5", ["5"]), ("1/2, 3/4", ["1/2", "3/4"]), ("11:30", ["11", "30"]), ("6*7=42", ["6", "7", "42"]), ("−5", ["-5"]),
        ("24a8", ["24", "8"]), ("1.2.3", ["1.2", "3"]), ("５", ["5"]), ("7 (apples)", ["7"]), ("4/", ["4"]), ("50%", ["50"]),
        ("1, 2, 3", ["1", "2", "3"]), ("2-1/2", ["2", "1/2"]), ("٤٢", []), ("+5", ["+5"]),
    ],
)  # fmt: skip
def test_numbers_as_written(text, numbers):
    assert find_numbers(text) == numbers
    assert count_numbers(text) == len(numbers)


# Choices

CHOICES = {
    "well-formed": (
        "B",
        True,
        [
            "Answer: B", "answer: b", "ANSWER:B", "Answer : B", "**Answer:** B", "**Answer: B**", "Answer: **B**",
            "**Answer**: B",
            "Answer: (B)", "Answer: B.", "Answer: B)", "Answer: [B]", "Answer: {B}", "Answer: <B>", "Answer: 'B'",
            'Answer: "B"',
            "Answer: `B`", "Answer: *B*", "Answer: _B_", "Answer: $B$", "Answer: \\boxed{B}", "Answer: \\boxed{\\text{B}}",
            "Answer: $\\boxed{\\mathrm{B}}$", "Answer: \\(B\\)", "Answer: \\text{(B)}", "Answer: B!", "Answer: B   \n\n",
            "Answer: B \u2705", "Answer: B\u2026", "Answer: B \\\\", "Answer: B<br />",
            "Answer: A\nAnswer: B", "Answer: B\nAnswer: maybe", "Answer: B\nAnswer: Z", "Answer: A Answer: B",
            "Final answer: B",
            "so the Answer: B\nI am sure.", "Ａｎｓｗｅｒ：Ｂ", "Ａｎｓｗｅｒ： （Ｂ）", "Answer: B\u200b", "Answer: B\r\nmore",
            "Answer: B. Same meaning", "Answer: B) Same meaning.", "Answer: B Same meaning", "Answer: (B) same  MEANING",
            "Answer: b Same meaning", "Answer: b (Same meaning)",
            "Answer: B - Same meaning", "Answer: B: Same meaning", "Answer: **B. Same meaning**", "Answer: B (Same meaning)",
            "Answer: B — Same meaning", "> Answer: B", "- Answer: B", "# Answer: B", "Answer:\tB", "Answer:\u00a0B",
        ],
    ),
    "extracted": (
        "B",
        False,
        [
            "B", "(B)", "**B**", "b.", "B)", "[B]", "\\boxed{B}", "$B$", "It is this.\n\nB\n\n", "Answer:\nB",
            "Answer: Option B",
            "I choose option B.", "Option B is right", "option **B**", "It is (B).", "(b) is right",
            "Option A is wrong, option B is right",
            "Answer: let us see.\n(B)", "Answer: the correct option (B).", "(i) and (ii) are false: (B)", "So it is (B).\n\nAnswer:",
            "So it is (B).\n\n**Answer:**", "Answer: The correct option is (B).", "Answer: Option B is correct",
            "Answer: Option (B): because", "Answer: Choice (B)", "Answer: The answer is (B).", "Answer: (B) because it fits",
            "Answer: The correct answer is option B.", "Answer: The answer is **option B**", "Reasoning.\nB \u2705",
            "**Answer:**\n\n**B** \u2705", "Unlike option A, option B fits.", "By eliminating (A), (B) is left.",
            "A\nB", "B\nbecause of this", "(A) is wrong.\nIt is (B)", "Option (B)", "Ｂ", "（Ｂ）",
        ],
    ),
    "nothing": (
        None,
        False,
        [
            "", "Answer:", "Answer: ", "Answer: B or C", "Answer: B and C", "Answer: B, C", "Answer: B/C",
            "Answer: B C", "Answer: BC",
            "Answer: a car", "Answer: Z", "Answer: K", "Answer: B+", "Answer: B2", "Answer: 2", "Answer: maybe",
            "Answer: B) Different meaning", "Answer: B because it is", "Answer: B or C\nDone", "I think a bird", "a bird and I",
            "The option I prefer", "an option a few take", "A good idea", "It is B.", "the answer is B", "f(B) = 3",
            "vitamin B",
            "nonanswer: B", "Answer is B", "answers: B", "Answer: not B", "(A) or (B)", "option A or option B",
            "It is (Z).", "B or C",
            "(A) is tempting.\nAnswer: Same meaning", "(A) is the distractor.\n\nAnswer: B because of this", "Answer: A or (B)",
            "Answer: not (B)", "(A), (B)", "(A)/(B)", "(A) & (B)", "option A, option B", "(A), or (B)",
            "Answer: option A is wrong, option B is right", "Answer: (C) because (B) fails",
            "Answer: Option A is wrong, so B.", "Answer: (A) is incorrect; B is right", "Answer: Option A is not correct.",
            "Answer: Option A is tempting but B is correct", "Answer: Option A as well as B", "(A), (B) are both correct.",
            "Both (A), (B) fit",
            "ANSWER - B", "Answer: Same meaning", "Answer: E) 5",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("response", "value", "well_formed"),
    [pytest.param(r, v, w, id=f"{group}: {r!a}") for group, (v, w, responses) in CHOICES.items() for r in responses],
)
def test_choices(response, value, well_formed):
    assert choice_answer(response, LABELS, OPTIONS) == Answer(value, well_formed)
    assert value is None or lenient_choice_correct(response, LABELS, OPTIONS, value)


def test_only_labels_of_this_example():
    for count in range(2, 11):
        for position, label in enumerate(LABELS):
            expected = Answer(label, True) if position < count else Answer(None, False)
            assert choice_answer(f"Answer: {label}", LABELS[:count]) == expected
            assert choice_answer(f"Answer: ({label.lower()})", list(LABELS[:count])) == expected


@pytest.mark.parametrize("position", range(len(OPTIONS)))
@pytest.mark.parametrize("form", ["{}) {}", "{}. {}", "({}) {}", "**{}) {}**", "{}: {}"])
def test_label_with_own_text_only(position, form):
    for other, option in enumerate(OPTIONS):
        response = f"Answer: {form.format(LABELS[position], option)}"
        answer = choice_answer(response, LABELS, OPTIONS)
        assert answer.well_formed is (other == position)
        assert answer.value == LABELS[position] or other != position


def test_text_after_a_label_without_known_options():
    assert choice_answer("Answer: B) 21.5", "ABCDE") == Answer("B", True)
    assert choice_answer("Answer: B. Same meaning", "AB") == Answer("B", True)
    assert choice_answer("Answer: B) or C)", "ABCDE") == Answer(None, False)
    assert choice_answer("Answer: B something", "ABCDE") == Answer(None, False)


@pytest.mark.parametrize(
    "option", ["\\frac{1}{4\\sqrt{27}}", "\\frac{11\\pi}{24}", "$\\sqrt{2}$", "(a) and (b)", "A or B", "-", "x < 3"]
)
def test_own_text_that_is_hard_to_read(option):
    assert choice_answer(f"Answer: B) {option}", "AB", ["other", option]) == Answer("B", True)


def test_own_text_as_a_number_of_another_form():
    assert choice_answer("Answer: B) 1200", "AB", ["1,100", "$1,200.00"]) == Answer("B", True)
    assert choice_answer("Answer: A) 0.5", "AB", ["\\frac{1}{2}", "1/3"]) == Answer("A", True)
    assert choice_answer("Answer: B) 28", "AB", ["20 °C", "28 °C"]) == Answer("B", True)
    assert choice_answer("Answer: b 21.5 km", "AB", ["20 km", "21.5 km"]) == Answer("B", True)
    halves = ["50% decrease", "50% increase"]
    for text in ("B \u2014 50% increase", "B = 50% increase", "B) 50%"):
        assert choice_answer(f"Answer: {text}", "AB", halves) == Answer("B", True)
    assert choice_answer("Answer: B) 50% decrease", "AB", halves) == Answer(None, False)
    assert choice_answer("Answer: A) 5 oranges", "AB", ["5 apples", "6 apples"]) == Answer(None, False)
    assert choice_answer("Answer: A \u2705", "AB", ["True \u2713", "False"]) == Answer("A", True)
    assert choice_answer("Answer: (i) is true, (ii) is false", "ABCDEFGHIJ", list("0123456789")) == Answer(None, False)
    for text in ("100% red", "more than 100% pink"):
        assert choice_answer(f"Answer: A. {text}", "AB", ["100% pink", "100% red"]) == Answer(None, False)
    assert choice_answer("Answer: B) 21.5 kilometers", "AB", ["20 km", "21.5 km"]) == Answer("B", True)
    assert choice_answer("Answer: A) 1500 J", "AB", ["1.5 x 10^3 J", "2 J"]) == Answer("A", True)
    assert choice_answer("Answer: A) \u2713", "AB", ["\u2717", "\u2713"]) == Answer(None, False)
    assert choice_answer("Answer: A) \\sqrt{x} y", "AB", ["\\frac{x}{y}", "2"]) == Answer(None, False)
    assert choice_answer("(i) and (ii) are true", "ABCDEFGHIJ") == Answer(None, False)
    assert choice_answer("(i) no (ii) yes\n\nI", "ABCDEFGHIJ") == Answer("I", False)


LENIENT_CHOICES = [
    ("So \\boxed{B}.", "B"),
    ("the answer is B", "B"),
    ("The correct answer is (B).", "B"),
    ("The answer is **B** because it fits.", "B"),
    ("The correct option is B", "B"),
    ("The answer is option B.", "B"),
    ("Answer: B because it fits", "B"),
    ("Reasons.\nSame meaning", "B"),
    ("Reasons.\nB) Same meaning", "B"),
    ("The answer is: Same meaning", "B"),
    ("Reasons.\nSame meaning.", "B"),
    ("The answer is A because it fits", "A"),
    ("Answer: a car", "D"),
    ("the answer is a dog", None),
    ("I think I know", None),
    ("The answer is B or C", None),
    ("Answer: A/B", None),
    ("Answer: B, C", None),
    ("The answer is I think so", None),
    ("The answer is not B", None),
    ("", None),
]


@pytest.mark.parametrize(("response", "label"), LENIENT_CHOICES)
def test_lenient_choices(response, label):
    assert [other for other in LABELS if lenient_choice_correct(response, LABELS, OPTIONS, other)] == ([label] if label else [])


# Any string

HOSTILE = st.text(
    st.sampled_from(list("0123456789.,/-+*=^():;%$#&<>|\\{}[]_`'\"!~ \n\r\t\x00abeixABI½²٢٣万−–—：＃５\u202e\u200b\ud800😀")),
    max_size=60,
)
PIECES = st.lists(
    st.sampled_from(
        ["####", "#### ", "Answer:", "Answer: ", "\\frac{", "\\boxed{", "}", "{", "\\text{", "1", "42", "1,234", "-",
        "/", " ", "\n",
         "(", ")", "=", "x 10^", "e9", "and", " or ", ";", "B", "option ", "answer is ", "<<", ">>", "**", ":", "a", "I", "."]
    ),
    max_size=40,
).map("".join)  # fmt: skip


def read_in_every_way(text, gold):
    by_gold = read_numeric(text, gold)
    assert by_gold.value != ""
    correct = numeric_correct(text, gold)
    assert correct is numeric_equal(by_gold.value, gold)
    assert lenient_numeric_correct(text, gold) or not correct
    numeric_gold(text)
    assert count_numbers(text) == len(find_numbers(text))
    for options in ((), OPTIONS):
        choice = choice_answer(text, LABELS, options)
        assert choice.value is None or (choice.value in LABELS and lenient_choice_correct(text, LABELS, options, choice.value))
        assert choice.value is not None or not choice.well_formed


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(st.text(), HOSTILE, PIECES), gold=st.one_of(st.sampled_from(["42", "2; 6", "9:2", "b", ""]), HOSTILE))
def test_never_raises(text, gold):
    read_in_every_way(text, gold)
    read_in_every_way(f"x\n#### {text}", gold)
    read_in_every_way(f"Answer: {text}", gold)


@settings(max_examples=200, deadline=None)
@given(number=st.integers())
def test_integers_round_trip(number):
    for form in (
        f"{number:,}",
        f"{number}",
        f"${number:,}",
        f"{number} apples",
        f"**{number}**",
        f"\\boxed{{{number}}}",
        f"{number}.0",
    ):
        assert read_numeric(f"#### {form}", str(number)) == Answer(str(number), True)
        assert numeric_correct(f"The answer is {form}", str(number))
    assert not numeric_correct(f"#### {number}", str(number + 1))


@settings(max_examples=200, deadline=None)
@given(value=st.fractions(), places=st.integers(0, 12))
def test_fractions_and_decimals_round_trip(value, places):
    decimal = f"{value.numerator // value.denominator}.{places:012d}"
    assert numeric_gold(decimal) == (decimal.rstrip("0").rstrip(".") if Fraction(decimal) else "0")
    assert numeric_gold(str(value)) == str(value)
    assert numeric_equal(str(Fraction(decimal)), decimal) and numeric_equal(numeric_gold(decimal), str(Fraction(decimal)))


@settings(max_examples=200, deadline=None)
@given(values=st.lists(st.integers(), min_size=2, max_size=5))
def test_several_values_round_trip(values):
    gold = "; ".join(map(str, values))
    assert numeric_gold(gold) == gold
    for separator in ("; ", ", ", " and "):
        assert numeric_correct(f"#### {separator.join(map(str, values))}", gold)
    assert numeric_correct(f"#### {gold}", "; ".join(map(str, reversed(values)))) is (values == values[::-1])


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(st.text(max_size=40), PIECES))
def test_a_normalized_number_is_canonical(text):
    gold = numeric_gold(text)
    assert count_normalized(gold) != 1 or numeric_gold(gold) == gold


@pytest.mark.parametrize(
    "text", [None, True, 42, 4.2, b"42", [], "\ud800", "\x00", "\u202e", "😀", "\u2028", "\x85", "\\", "\\frac{"]
)
def test_odd_inputs(text):
    assert read_numeric(text, "42") == Answer(None, False)
    assert choice_answer(text, LABELS, OPTIONS) == Answer(None, False)
    assert not numeric_correct(text, "42") and not lenient_numeric_correct(text, "42")
    assert not lenient_choice_correct(text, LABELS, OPTIONS, "A")
    assert find_numbers(text) == [] and count_numbers(text) == 0
    assert not numeric_equal(text if isinstance(text, str) else None, "42")


# Quadratic time would not finish on these. No time limit is asserted, because a shared machine may be slow.
LONG_UNITS = [
    "1", "1,", "1,234", ",234", "1.", ".", "1/", "/", "-", "+", "1-", "1 ", " ", "\n", "\t", "#", "####", "#### ",
    "#### 1", "####\n",
    "Answer:", "Answer: ", "Answer: B ", "Answer: B or ", "answer is ", "(", ")", "()", "(1", "1)", "{", "}",
    "\\boxed{", "\\frac{1",
    "\\frac{1}{", "\\frac{1}{2}", "\\", "\\text{", "^\\circ", "<<", "<", "<a", "<<1", ">", "=", "1=", "*", "**", "*a",
    "`", "_", "$",
    "e", "1e", "1e9", "x 10^", "1 x 10^3 ", "1 1/2 ", "½", "²", "a", "a-", "a^", "a'", "A ", "I ", "option ",
    "option B ", "(B) ",
    "B\n", "1;", "1 and ", "1 or ", "p. m", "１", "：", "\u200b", "\x00", "\ud800", "😀", "!", "\r", "\r\n", "0", "0x", ":",
    "1:",
]  # fmt: skip


@pytest.mark.parametrize("unit", LONG_UNITS, ids=lambda unit: f"{unit!a}")
def test_long_inputs_end(unit):
    text = unit * (HUGE // 8 // len(unit))
    for response in (text, f"#### {text}", f"Answer: {text}"):
        numeric_correct(response, "42")
        lenient_numeric_correct(response, "42")
        choice_answer(response, "ABCDE", OPTIONS[:5])
        lenient_choice_correct(response, "ABCDE", OPTIONS[:5], "A")
    numeric_gold(text)
    assert count_numbers(text) == len(find_numbers(text))


@pytest.mark.parametrize(
    "text", ["7" * HUGE, "1," * (HUGE // 2), "word " * (HUGE // 5), "#### 1\n" * (HUGE // 7)], ids=lambda t: t[:8]
)
def test_a_million_characters(text):
    read_in_every_way(text, "42")
    assert read_numeric(f"{text}\n#### 42", "42") == Answer("42", True)
    assert choice_answer(f"{text}\nAnswer: B", LABELS) == Answer("B", True)


def test_long_numbers():
    assert numeric_gold("0" * 100_000 + "42") != "42"  # no answer line is that long
    assert numeric_gold("0" * 1000 + "42") == "42"
    for number in ("9" * 300, "1/" + "9" * 300):
        assert read_numeric(f"#### {number}", number) == Answer(number, True)
    assert not read_numeric("#### " + "9" * 301, "42").well_formed
    assert numeric_gold("1e300") == str(10**300) and numeric_gold("1e301") == "1e301"
    gold = "7" * 5000
    assert numeric_correct(f"#### {gold}", gold) and not numeric_correct(f"#### {gold}8", gold)


# The real golds


def shared_rows(name: str):
    folder = os.environ.get("FIREDISTILL_SHARED") or Path(__file__).parents[2] / "shared"
    path = Path(folder) / "data" / f"{name}.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"needs data/{name}.jsonl.gz in the shared folder; name that folder in FIREDISTILL_SHARED")
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("split", ["train", "test"])
def test_gsm8k_golds(split):
    for row in shared_rows(f"gsm8k/{split}"):
        final = row["answer"].rpartition("####")[2].strip()
        gold = numeric_gold(final)
        assert gold == str(int(final.replace(",", "")))
        assert numeric_correct(row["answer"], gold) and read_numeric(row["answer"], gold) == Answer(gold, True)
        assert not numeric_correct(f"#### {int(gold) + 1}", gold)


def test_asdiv_golds():
    published = [row["answer"] for row in shared_rows("asdiv/validation")]
    golds = [numeric_gold(answer) for answer in published]
    wrong = [
        (answer, gold)
        for answer, gold in zip(published, golds, strict=True)
        if not all(numeric_correct(f"#### {text}", gold) for text in (answer, gold, f"**{answer}**", answer.replace(";", ",")))
        or not read_numeric(f"#### {answer}", gold).well_formed
        or numeric_gold(gold) != gold
    ]
    assert wrong == []
    several = [gold for gold in golds if "; " in gold]
    assert len(several) == sum(";" in answer for answer in published) == 90
    assert all(Fraction(value) is not None for gold in several for value in gold.split("; "))
    text = {gold for gold in golds if not gold.lstrip("-")[:1].isdigit()} | {gold for gold in golds if ":" in gold}
    assert sum(gold in text for gold in golds) == 56 + sum(":" in answer for answer in published)


@pytest.mark.parametrize("name", ["aqua_rat/train", "aqua_rat/test", "ai2_arc/train", "ai2_arc/test", "mmlu_pro/test"])
def test_option_labels_round_trip(name):
    failures = []
    for row in shared_rows(name):
        if "options" in row:
            prefix = 2 if name.startswith("aqua_rat") else 0  # `A)21`
            options = [option[prefix:].strip() for option in row["options"]]
        else:
            options = [option.strip() for option in row["choices"]["text"]]
        labels = LABELS[: len(options)]
        for label, option in zip(labels, options, strict=True):
            for response in (f"Answer: {label}", f"Answer: {label}) {option}"):
                if choice_answer(response, labels, options) != Answer(label, True) and "\n" not in option:
                    failures.append((response, options))
    assert failures == []
