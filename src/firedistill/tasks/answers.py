"""Reading final answers: text to an exact number or an option letter, and when two answers are the same.

A verdict decides which loss a response gets, so a misread answer teaches the wrong thing. The rules are therefore strict where
a text is ambiguous ("10 or 42" is no answer) and forgiving where only the typography varies ("$1,200.00" is 1200).

Every function returns for any string, in time linear in its length. Nothing is evaluated: no `eval`, no computer algebra. Every
repetition in the regular expressions is bounded or possessive, and no pattern can scan a stretch of text that a later attempt
scans again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, cast

MAX_DIGITS = 300  # of a number, and of its power of ten: what is longer is no answer, and would be slow to compute with
MAX_LINE_CHARACTERS = 2000  # no answer line is longer; of a longer last line only the end is searched for a number


@dataclass(frozen=True)
class Answer:
    """What a response answers.

    Attributes:
        value: normalised. A number is its canonical exact fraction (`"42"`, `"-7/2"`); several are joined (`"2; 6"`); anything
            else is text in lower case with single spaces (`"11:30"`). A choice is one of the labels. None: nothing was read.
        well_formed: the answer stood on the required line, in a form that counts.
    """

    value: str | None
    well_formed: bool


NO_ANSWER = Answer(None, False)


# Numeric answers


def numeric_answer(response: str) -> Answer:
    """The answer of a response whose gold is not known.

    >>> numeric_answer("6 * 7 = 42\\n#### 42 apples")
    Answer(value='42', well_formed=True)
    >>> numeric_answer("#### 2 and 6")
    Answer(value='2; 6', well_formed=True)
    >>> numeric_answer("So it is 42.")
    Answer(value='42', well_formed=False)

    The answer is what follows the last `####` that has something after it. Without one, the last number of the last line is
    still extracted: whether a student computes well and whether it keeps to the format are two facts.
    """
    plain = _ascii(response)
    content = _marked_content(plain)
    if content is not None:
        return Answer(_normalised(content), True)
    number = _last_number(_last_line(plain))
    return NO_ANSWER if number is None else Answer(str(number), False)


def numeric_gold(text: str) -> str:
    """A dataset's answer, normalised. Numbers that are normalised already stay as they are.

    >>> numeric_gold("1,200"), numeric_gold("7 (apples)"), numeric_gold("30 (girls); 15 (boys)"), numeric_gold("11:45 p.m.")
    ('1200', '7', '30; 15', '11:45 pm')
    """
    return _normalised(_cleaned(_ascii(text))) or ""


def numeric_equal(answer: str | None, gold: str) -> bool:
    """Whether a normalised answer is the gold: as exact rational numbers, all values in order, or as text. No tolerance.

    >>> numeric_equal("1/2", "0.50"), numeric_equal("6; 2", "2; 6"), numeric_equal(None, "42")
    (True, False, False)
    """
    return isinstance(answer, str) and answer != "" and (answer == gold or answer == numeric_gold(gold))


def numeric_correct(response: str, gold: str) -> bool:
    """Whether a response gives the gold answer, read as `read_numeric` does."""
    return numeric_equal(read_numeric(response, gold).value, gold)


def read_numeric(response: str, gold: str) -> Answer:
    """The answer of a response, in view of the kind of its gold.

    One number as gold: the answer line must submit exactly one value. Several: as many values. Text (a time, a ratio, a name):
    any text. An answer line of another kind is reported as it stands, not well-formed.

    >>> read_numeric("#### 12 (3 groups of 4)", "12")
    Answer(value='12', well_formed=True)
    >>> read_numeric("#### 10 or 42", "42")
    Answer(value='10 or 42', well_formed=False)
    >>> read_numeric("#### 2,6", "2; 6")
    Answer(value='2; 6', well_formed=True)
    """
    kind = _kind_of_gold(gold)
    plain = _ascii(response)
    content = _marked_content(plain)
    if content is not None:
        return _read(content, kind)
    line = _last_line(plain)
    if kind == 1:
        number = _last_number(line)
        return NO_ANSWER if number is None else Answer(str(number), False)
    return Answer(_read(line, kind).value, False)


def lenient_numeric_correct(response: str, gold: str) -> bool:
    """Whether any recognisable final answer of the response is the gold. A diagnostic: it tells failures of format from others.

    Recognised, besides what `numeric_correct` accepts: the last `\\boxed{}`, "the answer is 42", and the last number of the
    text, of the answer line, or for several values the last ones.
    """
    kind = _kind_of_gold(gold)
    return any(numeric_equal(value, gold) for value in _lenient_values(response, gold, kind))


def parse_number(text: str) -> Fraction | None:
    """The one number of a text with whatever decorates it; None when there is none, or more than one.

    >>> [str(parse_number(text)) for text in ("$1,200.50", "1 1/2", "50%", "\\\\boxed{\\\\frac{1}{2}}", "1.5e3", "6*7 = 42")]
    ['2401/2', '3/2', '50', '1/2', '1500', '42']
    >>> [parse_number(text) for text in ("10 or 42", "4 2", "0x2A", "10-20", "9:2", "3 hours 20 minutes", "1/0")]
    [None, None, None, None, None, None, None]

    Of an equation it is the value after the last equals sign; parentheses after a number are remarks.
    """
    values = _values(_cleaned(_ascii(text)))
    return values[0] if values is not None and len(values) == 1 else None


def find_numbers(text: str) -> list[str]:
    """Every number in a text as it is written: sign, digits, thousands commas, decimals, `a/b`.

    >>> find_numbers("16-3 is 13, not -1,200.5 or 3/4")
    ['16', '3', '13', '-1,200.5', '3/4']
    """
    return _WRITTEN_NUMBER.findall(_ascii(text))


def count_numbers(text: str) -> int:
    """How many numbers a text holds, counted as in `find_numbers`."""
    return sum(1 for _ in _WRITTEN_NUMBER.finditer(_ascii(text)))


# Choice answers


def choice_answer(response: str, labels: Sequence[str], options: Sequence[str] = ()) -> Answer:
    """The option that a response chooses, as one of `labels`.

    >>> choice_answer("**Answer:** (b).", "ABCD")
    Answer(value='B', well_formed=True)
    >>> choice_answer("Answer: B) 21.5", "ABCD", ["20", "21.5", "22", "23"])
    Answer(value='B', well_formed=True)
    >>> choice_answer("Answer: B or C", "ABCD")
    Answer(value=None, well_formed=False)

    It is the last `Answer: X` whose X is a label: alone, or followed by its bracket, punctuation, or the option's own text.
    Without one, the last line that consists of a label, or the last `option X` or `(X)`, is extracted. A letter in prose never
    is: "a" and "I" are English words.

    Args:
        labels: the labels of this very example; another letter is no answer.
        options: the options' texts in the order of `labels`. Without them, any text may follow a label and its bracket.
    """
    plain = _ascii(response)
    for line in reversed(plain.split("\n")):
        for content in reversed(_CHOICE_MARKER.split(line)[1:]):
            label = _leading_label(content, labels, options)
            if label is not None:
                return Answer(label, True)
    return Answer(_mentioned_label(plain, labels), False)


def lenient_choice_correct(response: str, labels: Sequence[str], options: Sequence[str], gold: str) -> bool:
    """Whether any recognisable choice of the response is the gold. A diagnostic, like `lenient_numeric_correct`.

    Recognised, besides what `choice_answer` reads: the last `\\boxed{B}`, "the answer is B", `Answer: B because ...`, the last
    `option B`, a lone label or `B) ...` as the last line, and the option's own text as the last line or after `Answer:`.
    """
    plain = _ascii(response)
    return any(label is not None and label == gold for label in _lenient_labels(plain, labels, options))


# Typography: what is read as ASCII, and what is removed

_DASHES = "\u2010\u2011\u2012\u2013\u2212\ufe63"
_INVISIBLE = [0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFE0E, 0xFE0F, 0xFEFF]
_VULGAR_FRACTIONS = {
    "¼": "1/4", "½": "1/2", "¾": "3/4", "⅐": "1/7", "⅑": "1/9", "⅒": "1/10", "⅓": "1/3", "⅔": "2/3", "⅕": "1/5",
    "⅖": "2/5", "⅗": "3/5", "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip
_ASCII: dict[int, str | None] = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # the full-width forms of ! to ~
    **dict.fromkeys(map(ord, _DASHES), "-"),
    **dict.fromkeys(_INVISIBLE),
    **{ord(sign): f" {fraction}" for sign, fraction in _VULGAR_FRACTIONS.items()},
    **{0x2044: "/", 0x2215: "/", 0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x3000: " ", 0x3002: ".", 0xFFE0: "¢"},
    **{0xFFE1: "£", 0xFFE5: "¥"},
}

_CALCULATOR_MARK = re.compile(r"<<[^<>]*+>>")  # GSM8K's working: 6*7=<<6*7=42>>42
_TAG = re.compile(r"</?\|?[A-Za-z_]{1,20}\|?>")  # <b>, </answer>, <|im_end|>
_ANGLE_BRACKETS = re.compile(r"\s*+<([^<>]*+)>\s*+")  # <42>
_DEGREES = re.compile(r"\^\s{0,3}+\{?\s{0,3}+\\circ(?![A-Za-z])\s{0,3}+\}?")
_BRACED_POWER = re.compile(r"\^\{([-+]?[0-9]{1,4})\}")
_SIGN_COMMAND = re.compile(r"\\(times|cdot|div|approx|sqrt|pi|infty|pm|leq?|geq?|neq?|Rightarrow|rightarrow|to)(?![A-Za-z])")
_SIGN_OF_COMMAND = {
    "times": "×", "cdot": "·", "div": "÷", "approx": "≈", "sqrt": "√", "pi": "π", "infty": "∞", "pm": "±", "le": "≤",
    "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠", "Rightarrow": " = ", "rightarrow": " = ", "to": " = ",
}  # fmt: skip
_WRAPPER_COMMAND = re.compile(
    r"\\(?:boxed|fbox|mbox|text(?:bf|rm|it|tt|sf)?|math(?:bf|rm|it|tt|sf)|operatorname|displaystyle|left|right|q?quad)(?![A-Za-z])"
    r"|\\[()\[\],;:! ]"
)
_FRACTION_COMMAND = re.compile(
    r"\\[cdt]?frac\s{0,3}+(?:"
    r"\{\s{0,3}+([-+]?)\s{0,3}+([0-9][0-9.,]{0,300}+)\s{0,3}+\}\s{0,3}+\{\s{0,3}+([0-9][0-9.,]{0,300}+)\s{0,3}+\}"
    r"|(?<=c)([0-9])([0-9])(?![\w.]))"
)
_MARKUP = {ord(character): " " for character in "{}`_"}
_BOLD = re.compile(r"\*{2,3}+")
_EMPHASIS = re.compile(r"(?<![\w)*.])\*(?=\S)([^*]++)(?<=\S)\*(?![\w(*])")  # *42*, but not the star of 6*7
_ARROW = re.compile(r"[-=]{1,3}+>|[→⇒⟹]")


def _ascii(text: object) -> str:
    """Full-width forms, dashes, quotes and vulgar fractions as ASCII, line breaks as `\\n`, invisible characters removed."""
    if not isinstance(text, str):
        return ""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.isascii() else text.translate(_ASCII)


def _cleaned(text: str) -> str:
    """One line without markdown, LaTeX commands and tags, with single spaces.

    What is removed leaves a space: otherwise the power `10**3` would become the number 103.
    """
    if "<" in text:
        whole = _ANGLE_BRACKETS.fullmatch(text)
        text = whole[1] if whole else _TAG.sub(" ", _CALCULATOR_MARK.sub(" ", text))
    if "\\" in text:
        text = text.replace(",\\!", ",").replace("\\$", "$").replace("\\%", "%")
        text = _DEGREES.sub("°", text)
        text = _SIGN_COMMAND.sub(lambda match: _SIGN_OF_COMMAND[match[1]], text)
        text = _WRAPPER_COMMAND.sub(" ", text)
        text = text.replace("}^", "^")  # \text{cm}^2
        text = _FRACTION_COMMAND.sub(_plain_fraction, text)
    text = _BRACED_POWER.sub(r"^\1", text.replace("{,}", ",").replace("!=", "≠")).translate(_MARKUP)
    if "*" in text:
        text = _EMPHASIS.sub(r" \1 ", _BOLD.sub(" ", text))
    return " ".join(_ARROW.sub(" = ", text).split())


def _plain_fraction(match: re.Match[str]) -> str:
    sign, numerator, denominator, digit, other_digit = match.groups()
    return f" {sign or ''}{numerator or digit}/{denominator or other_digit} "


_DAYTIME = re.compile(r"(?<![A-Za-z])([ap])\. ?m(?![A-Za-z])\.?")
_SPACED_JOINER = re.compile(r"(?<=[0-9]) ?([:-]) ?(?=[0-9])")
_TEXT_ENDS = " .,;:!?'\"$="


def _normalised_text(cleaned: str) -> str:
    """Text as it is compared: lower case, `9 : 2` as `9:2`, `p.m.` as `pm`, no punctuation at its ends."""
    text = _SPACED_JOINER.sub(r"\1", _DAYTIME.sub(r"\1m", cleaned.lower()))
    return text.strip(_TEXT_ENDS)


# Lines and markers

_NUMERIC_MARKER = re.compile(r"(?<!#)####(?!#)")
_CHOICE_MARKER = re.compile(r"(?<![^\W_])answer[\s*_`]{0,8}+:", re.IGNORECASE)


def _marked_content(plain: str) -> str | None:
    """What follows the last `####` with something after it on its line, cleaned. Markup and blanks are nothing."""
    for line in reversed(plain.split("\n")):
        for content in reversed(_NUMERIC_MARKER.split(line)[1:]):
            cleaned = _cleaned(content)
            if cleaned.strip("*"):
                return cleaned
    return None


def _last_line(plain: str) -> str:
    """The last line that is not blank, cleaned, and only its end where it is very long."""
    for line in reversed(plain.split("\n")):
        if line.strip():
            return _end_of(_cleaned(line))
    return ""


def _end_of(line: str) -> str:
    """The last characters of a line, from a space on, so that no number is cut in two."""
    return line if len(line) <= MAX_LINE_CHARACTERS else line[-MAX_LINE_CHARACTERS:].partition(" ")[2]


# From text to numbers

_DIGITS = r"(?:[1-9][0-9]{0,2}+(?:,[0-9]{3}(?![0-9]))++|[0-9]++)"
_WRITTEN_NUMBER = re.compile(
    rf"(?:(?<![\w.,)\]%])[-+])?+(?:{_DIGITS}(?:\.[0-9]++)?+|(?<![\w.])\.[0-9]++)(?:/[0-9]++(?:\.[0-9]++)?+)?+"
)
_TOKEN = re.compile(
    rf"(?P<number>(?:{_DIGITS}(?:\.[0-9]++)*+|(?<![\w.])\.[0-9]++)(?:[eE][-+]?[0-9]++(?!\w))?+)"
    r"|(?P<word>[^\W\d_][\w']*+(?:(?:\^-?+|-)\w++)*+(?:(?<=[0-9])(?:\.[0-9]++)++)?+)"
    r"|(?P<symbol>\S)"
)
_MEANINGFUL = frozenset("+-*/^=:·×÷")  # other symbols are decoration, but for those that make a number something else
_FOREIGN = frozenset("^<>|√±∞≤≥≠")
_OPERATORS = frozenset("+-*/^·×÷")
_FOREIGN_WORDS = frozenset(["sqrt", "log", "ln", "sin", "cos", "tan", "pi", "π", "infty", "infinity", "half", "halves", "not"])
_HEADING_WORDS = frozenset(["step", "part", "case", "section", "question", "problem", "example"])
_MAGNITUDES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_GLUED_VARIABLES = frozenset("xyznkieXYZNKE")  # 2x and 5k are not 2 and 5
_SQUARED_UNIT = re.compile(r"(?:mm|cm|dm|km|m|in|ft|yd|mi)\^?[23]")
_CANONICAL = re.compile(r"-?[0-9]{1,5000}+(?:/[0-9]{1,5000}+)?+")


class _Token(NamedTuple):
    kind: str  # number, word, symbol, or group: a parenthesis with its content, whose text is the words in it
    text: str
    start: int
    end: int


def _kind_of_gold(gold: str) -> int:
    """How many numbers the gold consists of; 0: it is text."""
    values = numeric_gold(gold).split("; ")
    return len(values) if all(_CANONICAL.fullmatch(value) for value in values) else 0


def _read(content: str, kind: int) -> Answer:
    """A cleaned answer line in view of the kind of its gold."""
    text = _normalised_text(content)
    if kind == 0:
        return Answer(text or None, bool(text))
    values = _values(content)
    if kind > 1 and (values is None or len(values) != kind):
        # `148,296` is one number elsewhere; where two values are asked for, the comma may separate them.
        separated = _values(content.replace(",", ", "))
        values = separated if separated is not None and len(separated) == kind else values
    if values is None:
        return Answer(text or None, False)
    return Answer(_joined(values), len(values) == kind)


def _normalised(content: str) -> str | None:
    """A cleaned answer line, normalised without a gold in view."""
    values = _values(content)
    return (_normalised_text(content) or None) if values is None else _joined(values)


def _joined(values: Sequence[Fraction]) -> str:
    return "; ".join(str(value) for value in values)


def _values(content: str) -> list[Fraction] | None:
    """The values that a cleaned line submits, in order; None where something in it is no plain value.

    Values are separated by commas, semicolons or "and". Between alternatives ("10 or 42") the writer has not decided.
    """
    if len(content) > MAX_LINE_CHARACTERS:
        return None
    values: list[Fraction] = []
    alternatives = False
    part: list[_Token] = []
    for token in [*_without_remarks(_tokens(content)), _Token("symbol", ";", len(content), len(content))]:
        if not _separates(token):
            part.append(token)
            continue
        alternatives = alternatives or token.text.lower() == "or"
        if any(other.kind == "number" for other in part):
            value = _single_value(part)
            if value is None:
                return None
            values.append(value)
        elif any(_is_foreign(other) for other in part):
            return None  # "2 and a half"
        part = []
    return values if values and not (alternatives and len(values) > 1) else None


def _tokens(content: str) -> list[_Token]:
    return [_Token(match.lastgroup or "", match[0], match.start(), match.end()) for match in _TOKEN.finditer(content)]


def _separates(token: _Token) -> bool:
    return token.text.lower() in ("and", "or") if token.kind == "word" else token.text in (",", ";", "&")


def _without_remarks(tokens: Sequence[_Token]) -> list[_Token]:
    """`12 (3 groups of 4)` as 12 and one group. Where all numbers are in parentheses, `-(1/3)`, only these disappear."""
    outside: list[_Token] = []
    group: list[_Token] = []
    depth = start = 0
    for token in tokens:
        if token.text == "(":
            if depth == 0:
                group, start = [], token.start
            depth += 1
        elif token.text == ")" and depth > 0:
            depth -= 1
            if depth == 0:
                outside.append(_group(group, start, token.end))
        elif token.text != ")":
            (group if depth else outside).append(token)
    if depth:
        outside.append(_group(group, start, tokens[-1].end))
    if any(token.kind == "number" for token in outside):
        return outside
    return [token for token in tokens if token.text not in ("(", ")")]


def _group(tokens: Sequence[_Token], start: int, end: int) -> _Token:
    return _Token("group", " ".join(token.text for token in tokens if token.kind == "word"), start, end)


def _single_value(part: Sequence[_Token]) -> Fraction | None:
    """The one number of a part of a line; None where there are several, or where it is an operand or a label."""
    if any(token.text in "<>≤≥≠" for token in part if token.kind == "symbol"):
        return None  # `x <= 4` is no equation
    items = [token for token in _after_equals_sign(part) if token.kind != "symbol" or _matters(token)]
    first = next((index for index, token in enumerate(items) if token.kind == "number"), None)
    if first is None:
        return None
    allowed = 0 if _power_of_ten(items, first + 1) is None else 1  # scientific notation is the one place for a foreign sign
    if sum(map(_is_foreign, items)) > allowed:
        return None
    value, end = _number_at(items, first)
    before, after = items[:first], items[end:]
    if value is None or any(token.kind == "number" for token in after) or not _may_follow(items[end - 1], after):
        return None
    if after and after[0].text.lower() in _MAGNITUDES:
        value *= _MAGNITUDES[after[0].text.lower()]
    if before and before[-1].text in ("+", "-"):
        value = -value if before[-1].text == "-" else value
        before = before[:-1]
        if before and before[-1].kind == "group":
            return None
    return value if _may_precede(before, items[first]) else None


def _after_equals_sign(part: Sequence[_Token]) -> Sequence[_Token]:
    """What stands after the last equals sign that has a number after it: `6*7 = 42` states 42."""
    last_number = max(index for index, token in enumerate(part) if token.kind == "number")
    for index in range(last_number, -1, -1):
        if part[index].text == "=":
            return part[index + 1 :]
    return part


def _matters(token: _Token) -> bool:
    return token.text in _MEANINGFUL or _is_foreign(token)


def _is_foreign(token: _Token) -> bool:
    """Whether it turns the number beside it into another one, or into none: a root, a power, digits of another script."""
    if token.kind == "word":
        return token.text.lower() in _FOREIGN_WORDS or token.text[0].isnumeric()
    return token.kind == "symbol" and (token.text in _FOREIGN or token.text.isnumeric())


def _may_follow(number: _Token, after: Sequence[_Token]) -> bool:
    """Whether these leave the number before them a plain value: words and units do, an operator does not."""
    after = [token for token in after if token.text != "="]
    if not after:
        return True
    follower, following = after[0], after[1].kind if len(after) > 1 else ""
    glued = follower.start == number.end
    if follower.kind == "word":
        return not glued or _is_unit(number.text, follower.text)
    if follower.kind == "group":
        return not glued or follower.text != ""  # 7(apples), but 2(3+4) is a product
    if follower.text == "/":
        return following == "word"  # 5/hour
    if follower.text == ":":
        return following == ""  # in `2: add` the number is the name of what follows
    if follower.text == "-":
        return following in ("word", "")  # 42-year-old
    return False


def _is_unit(number: str, word: str) -> bool:
    if word[0] in "xXbBoO" and number == "0":
        return False  # hexadecimal and its kin
    if any(character.isnumeric() for character in word):
        return _SQUARED_UNIT.fullmatch(word.replace("²", "2").replace("³", "3")) is not None
    return word not in _GLUED_VARIABLES


def _may_precede(before: Sequence[_Token], number: _Token) -> bool:
    """Whether these leave the number after them, whose sign is already taken, a plain value."""
    if not before:
        return True
    last = before[-1]
    if last.kind == "word":
        return last.text.lower() not in _HEADING_WORDS  # the markdown heading `#### Step 2`
    if last.kind == "group":
        return last.end != number.start or last.text != ""
    return last.text not in _OPERATORS


def _number_at(items: Sequence[_Token], index: int) -> tuple[Fraction | None, int]:
    """The unsigned number that begins at `index`, and where it ends: a decimal, `a/b`, `1 1/2`, or `1.5 x 10^3`."""
    value = _decimal(items[index].text)
    power = _power_of_ten(items, index + 1)
    if power is not None:
        exponent, end = power
        return (None if value is None or abs(exponent) > MAX_DIGITS else value * Fraction(10) ** exponent), end
    if _is_fraction(items, index):
        return _fraction_at(items, index)
    separate = index + 1 < len(items) and items[index + 1].start > items[index].end
    if separate and _is_fraction(items, index + 1) and all(_is_integer(items[index + offset]) for offset in (0, 1, 3)):
        fraction, end = _fraction_at(items, index + 1)
        if value is not None and fraction is not None and fraction <= 1:
            return value + fraction, end
    return value, index + 1


def _is_fraction(items: Sequence[_Token], index: int) -> bool:
    kinds = [token.kind for token in items[index : index + 3]]
    return kinds == ["number", "symbol", "number"] and items[index + 1].text == "/"


def _fraction_at(items: Sequence[_Token], index: int) -> tuple[Fraction | None, int]:
    numerator, denominator = _decimal(items[index].text), _decimal(items[index + 2].text)
    end = index + 3
    chained = end + 1 < len(items) and items[end].text == "/" and items[end + 1].kind == "number"
    if chained or numerator is None or not denominator:
        return None, end  # a date, or a division by zero
    return numerator / denominator, end


def _is_integer(token: _Token) -> bool:
    return token.kind == "number" and "." not in token.text and "e" not in token.text.lower()


def _power_of_ten(items: Sequence[_Token], index: int) -> tuple[int, int] | None:
    """The exponent of `x 10^3` at `index`, and where it ends."""
    texts = [token.text for token in items[index : index + 5]]
    if len(texts) < 4 or texts[0] not in ("x", "X", "×", "*", "·") or texts[1] != "10" or texts[2] != "^":
        return None
    signed = texts[3] in ("-", "+")
    position = index + (4 if signed else 3)
    if position >= len(items) or not _is_integer(items[position]) or len(items[position].text) > 4:
        return None
    exponent = int(items[position].text.replace(",", ""))
    return (-exponent if texts[3] == "-" else exponent), position + 1


def _decimal(text: str) -> Fraction | None:
    """`1,200.5` or `1e3` as a fraction; None for `1.2.3` and for more digits than any answer has."""
    mantissa, _, exponent_text = text.lower().partition("e")
    whole, _, decimals = mantissa.replace(",", "").partition(".")
    if "." in decimals:
        return None
    whole, decimals = whole.lstrip("0"), decimals.rstrip("0")
    exponent_digits = exponent_text.lstrip("+-").lstrip("0")
    if len(whole) + len(decimals) > MAX_DIGITS or len(exponent_digits) > 4:
        return None
    exponent = int(exponent_digits or "0") * (-1 if exponent_text.startswith("-") else 1)
    if abs(exponent) > MAX_DIGITS:
        return None
    return Fraction(int(whole + decimals or "0")) * Fraction(10) ** (exponent - len(decimals))


def _numbers_in(line: str) -> list[Fraction | None]:
    """Every number of a cleaned line, prose included; None for what is written with digits but is no number."""
    items = [token for token in _tokens(_end_of(line)) if token.kind != "symbol" or _matters(token) or token.text in "()%"]
    numbers = []
    index = 0
    while index < len(items):
        if items[index].kind != "number":
            index += 1
            continue
        value, end = _number_at(items, index)
        numbers.append(value if value is None else _number_in_prose(items, index, end, value))
        index = end
    return numbers


def _number_in_prose(items: Sequence[_Token], index: int, end: int, value: Fraction) -> Fraction | None:
    """A number with its sign; None where it is part of a time, a ratio, a range or a power."""
    number, last = items[index], items[end - 1]
    if end < len(items) and items[end].start == last.end:
        follower = items[end]
        if follower.kind == "word" and not _is_unit(last.text, follower.text):
            return None
        if _is_foreign(follower) or (follower.text == ":" and end + 1 < len(items) and items[end + 1].start == follower.end):
            return None
    if end < len(items) and items[end].text.lower() in _MAGNITUDES:
        value *= _MAGNITUDES[items[end].text.lower()]
    if index == 0:
        return value
    sign, glued = items[index - 1], items[index - 1].end == number.start
    earlier = items[index - 2] if index > 1 else None
    joined = earlier is not None and (earlier.kind == "number" or earlier.text in (")", "%"))
    if _is_foreign(sign) and sign.kind == "symbol":
        return None
    if earlier is not None and joined and glued and sign.text in (":", "-") and earlier.end == sign.start:
        return None
    return -value if sign.text == "-" and not joined else value


def _last_number(line: str) -> Fraction | None:
    numbers = _numbers_in(line)
    return numbers[-1] if numbers else None


# Lenient reading of numbers

_ANSWER_PHRASE = re.compile(r"(?<![^\W_])answer[\s*_`]{0,8}+(?:is|equals|:|=)(?!\w)[\s*_`:]{0,8}+", re.IGNORECASE)


def _lenient_values(response: str, gold: str, kind: int) -> Iterator[str | None]:
    plain = _ascii(response)
    yield read_numeric(response, gold).value
    statements = [_boxed(plain), _after_last(_ANSWER_PHRASE, plain)]
    for statement in statements:
        if statement:
            yield _read(statement, kind).value
    marked, line = _marked_content(plain), _last_line(plain)
    if kind == 0:
        normalised = numeric_gold(gold)
        for text in map(_normalised_text, [*filter(None, statements), marked or "", line]):
            yield text
            if f" {text}".endswith(f" {normalised}"):
                yield normalised
        return
    for statement in statements:
        yield from _first_and_last(_numbers_in(statement or ""), kind)
    yield from _first_and_last(_numbers_in(marked or ""), kind)
    for line in reversed(plain.split("\n")):
        numbers = _numbers_in(_cleaned(line)) if line else []
        if numbers:
            yield from _first_and_last(numbers, kind)[1:]
            return


def _first_and_last(numbers: Sequence[Fraction | None], count: int) -> list[str | None]:
    """The first and the last `count` numbers, each normalised."""
    ends = (numbers[:count], numbers[-count:])
    return [_joined(cast(Sequence[Fraction], end)) if len(end) == count and None not in end else None for end in ends]


def _boxed(plain: str) -> str | None:
    """The content of the last `\\boxed{}`, cleaned."""
    opening = plain.rfind("\\boxed{")
    if opening < 0:
        return None
    start = opening + len("\\boxed{")
    depth = 1
    for match in re.finditer(r"[{}]", plain[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return _cleaned(plain[start : start + match.start()])
    return _cleaned(plain[start:].partition("\n")[0])


def _after_last(pattern: re.Pattern[str], plain: str) -> str | None:
    """What follows the last match of a pattern, to the end of its line, cleaned."""
    end = max((match.end() for match in pattern.finditer(plain)), default=None)
    return None if end is None else _cleaned(plain[end:].partition("\n")[0])[:MAX_LINE_CHARACTERS]


# From text to labels

_OPENERS = " ([<\"'*$#"
_CLOSERS = " )]>.,;:!?\"'*$"
_MENTION = re.compile(r"(?<!\w)(?:option[\s*_`(\[]{1,8}+(\w{1,8}+)(?!\w)|\(\s{0,3}+(\w{1,8}+)\s{0,3}+\)(?!\w))", re.IGNORECASE)
_CHOICE_PHRASE = re.compile(
    r"(?<![^\W_])(?:answer|option|choice)[\s*_`]{0,8}+(?:is|:)(?!\w)[\s*_`:]{0,8}+(?:option(?!\w)[\s*_`]{0,8}+)?+",
    re.IGNORECASE,
)
_VERB = re.compile(r"\s{1,8}+(?:is|was|as|because|since)(?!\w)")
_WORD = re.compile(r"\w{1,8}+(?!\w)")
_JOINER = re.compile(r"[\s)*\],/&]{1,8}+(?:(?:or|and)(?!\w))?+[\s(*\[]{0,8}+", re.IGNORECASE)
_NEXT_LETTER = re.compile(r"\s{0,8}+[^\W\d_]")
_ALTERNATIVE = re.compile(r"[\s*_`)(,/]{0,8}+(?:or|and|/|,)[\s*_`)(]{0,8}+", re.IGNORECASE)


def _label_named(text: str, labels: Sequence[str]) -> str | None:
    return next((label for label in labels if label.upper() == text.upper()), None)


def _leading_label(content: str, labels: Sequence[str], options: Sequence[str]) -> str | None:
    """The label that a line states, if it states nothing else but the option's own text."""
    text = _cleaned(content).lstrip(_OPENERS)
    word = _WORD.match(text)
    label = _label_named(word[0], labels) if word else None
    if label is None:
        return None
    rest = text[len(label) :]
    remainder = rest.strip(_CLOSERS).lstrip(_OPENERS)
    if not remainder.strip("-\u2014 "):
        return label
    if text[0].islower() and rest[0] == " ":
        return None  # "a car"
    own_texts = [option for other, option in zip(labels, options, strict=False) if other == label]
    if not own_texts:
        return label if rest[0] in ")].:" and not _names_a_label(remainder, labels) else None
    undashed = remainder.removeprefix("- ").removeprefix("\u2014").removeprefix("= ")
    return label if any(_same_option(found, own_texts[0]) for found in (remainder, undashed)) else None


def _names_a_label(text: str, labels: Sequence[str]) -> bool:
    return any(_label_named(word, labels) is not None for word in re.findall(r"\w++", text))


def _same_option(found: str, option: str) -> bool:
    """Whether a cleaned quotation is the option's own text: but for case, spaces, typography, and how a number is written."""
    option = _cleaned(_ascii(option))
    if _comparable(found) == _comparable(option):
        return _comparable(found) != ""
    values = _values(found)
    return values is not None and len(values) == 1 and values == _values(option)


def _comparable(cleaned: str) -> str:
    return cleaned.lower().strip(_OPENERS + _CLOSERS)


def _mentioned_label(plain: str, labels: Sequence[str]) -> str | None:
    """The label of the last line that consists of one, or of the last `option X` or `(X)`, whichever comes later."""
    for line in reversed(plain.split("\n")):
        alone = _lone_label(line, labels)
        if alone is not None:
            return alone
        mentions = [mention for match in _MENTION.finditer(line) if (mention := _mention(match, line, labels)) is not None]
        if mentions:
            (label, start, _), earlier = mentions[-1], mentions[-2] if len(mentions) > 1 else None
            undecided = earlier is not None and earlier[0] != label and _ALTERNATIVE.fullmatch(line[earlier[2] : start][:40])
            return None if undecided else label
    return None


def _lone_label(line: str, labels: Sequence[str]) -> str | None:
    if not line or len(line) > MAX_LINE_CHARACTERS:
        return None
    return _label_named(_cleaned(line).strip(_OPENERS + _CLOSERS), labels)


def _mention(match: re.Match[str], line: str, labels: Sequence[str]) -> tuple[str, int, int] | None:
    """The label of a mention and its extent; None where the letter is an English word, as in "the option I prefer"."""
    word = match[1] or match[2]
    label = _label_named(word, labels)
    if label is None:
        return None
    if match[1] and word in ("a", "i", "I") and _is_prose(line, match.end()):
        return None
    return label, match.start(), match.end()


def _lenient_labels(plain: str, labels: Sequence[str], options: Sequence[str]) -> Iterator[str | None]:
    yield choice_answer(plain, labels, options).value
    yield _mentioned_label(plain, labels)
    line = _last_line(plain)
    for statement in (_boxed(plain), _after_last(_CHOICE_PHRASE, plain), _after_last(_CHOICE_MARKER, plain)):
        if statement:
            yield _stated_label(statement, labels)
            yield _label_of_text(statement, labels, options)
    yield _lone_label(line, labels)
    yield _leading_label(line, labels, options)
    yield _label_of_text(line, labels, options)


def _stated_label(statement: str, labels: Sequence[str]) -> str | None:
    """The label that a statement begins with, unless it is an English word or one of several alternatives."""
    text = statement.lstrip(_OPENERS)
    word = _WORD.match(text)
    if word is None or (word[0] in ("a", "A", "i", "I") and _is_prose(text, word.end())):
        return None
    joiner = _JOINER.match(text, word.end())
    other = _WORD.match(text, joiner.end()) if joiner else None
    if other and other[0] not in ("a", "i", "I") and _label_named(other[0], labels):
        return None
    return _label_named(word[0], labels)


def _is_prose(text: str, end: int) -> bool:
    """Whether the letter that ends here may be the English "a" or "I": another word follows, and no verb of an option."""
    return _NEXT_LETTER.match(text, end) is not None and _VERB.match(text, end) is None


def _label_of_text(text: str, labels: Sequence[str], options: Sequence[str]) -> str | None:
    """The label of the one option whose own text this is."""
    if len(text) > MAX_LINE_CHARACTERS:
        return None
    matching = [label for label, option in zip(labels, options, strict=False) if _same_option(text, option)]
    return matching[0] if len(matching) == 1 else None
