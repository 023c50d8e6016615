"""Reads numbers: which numbers a response states as its answer, and whether they are the gold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from firedistill.tasks.answers.text import (
    MAX_LINE_CHARACTERS,
    Answer,
    after_last,
    boxed,
    clean,
    end_of_line,
    last_line,
    to_ascii,
)

MAX_DIGITS = 300  # of a number and of its power of ten; longer numbers are not answers and would be slow to compute with


def numeric_gold(text: str) -> str:
    """A dataset's answer, normalized. Normalized numbers stay as they are.

    >>> numeric_gold("1,200"), numeric_gold("7 (apples)"), numeric_gold("30 (girls); 15 (boys)"), numeric_gold("11:45 p.m.")
    ('1200', '7', '30; 15', '11:45 pm')
    >>> numeric_gold("$2.50"), numeric_gold("10/4"), numeric_gold("2.5 (kg); 7 (kg)")
    ('2.5', '5/2', '2.5; 7')
    """
    content = clean(to_ascii(text))
    values = stated_values(content)
    return _normalized_text(content) if values is None else _joined(values, content)


def numeric_equal(answer: str | None, gold: str) -> bool:
    """Whether a normalized answer is the gold: as exact rational numbers, all values in order, or as text. No tolerance.

    >>> numeric_equal("1/2", "0.50"), numeric_equal("6; 2", "2; 6"), numeric_equal(None, "42")
    (True, False, False)
    """
    if not isinstance(answer, str) or answer == "":
        return False
    return answer == gold or exact_values(answer) == exact_values(numeric_gold(gold))


def exact_values(normalized: str) -> str | tuple[Fraction, ...]:
    """The values of normalized numbers; text stays as it is."""
    try:
        return tuple(map(Fraction, normalized.split("; "))) if count_normalized(normalized) else normalized
    except (ValueError, ZeroDivisionError):  # too many digits for any answer; 1/0
        return normalized


def read_numeric(response: str, gold: str) -> Answer:
    """The answer of a response, read as the gold requires.

    For a gold of one number, the answer line must state exactly one value; for several numbers, as many values; for text (a time,
    a ratio, a name), any text. Any other answer line is returned as it stands, not well-formed.

    >>> read_numeric("#### 12 (3 groups of 4)", "12")
    Answer(value='12', well_formed=True)
    >>> read_numeric("#### 10 or 42", "42")
    Answer(value='10 or 42', well_formed=False)
    >>> read_numeric("#### 2,6", "2; 6")
    Answer(value='2; 6', well_formed=True)
    """
    count = count_values(gold)
    plain = to_ascii(response)
    content = _marked_content(plain)
    if content is not None:
        return _read_line(content, count)
    line = last_line(plain)
    return Answer(_last_number(line) if count == 1 else _read_line(line, count).value, False)


def lenient_numeric_correct(response: str, gold: str) -> bool:
    """Whether any recognizable final answer of the response is the gold: a diagnostic that separates format errors from others.

    Besides the answer of `read_numeric`, these are recognized: the last `\\boxed{}`, "the answer is 42", and the last number of
    the text or of the answer line (the last numbers, if the gold has several).
    """
    return any(numeric_equal(value, gold) for value in _lenient_values(response, gold))


def find_numbers(text: str) -> list[str]:
    """Every number in a text as it is written: sign, digits, thousands commas, decimals, `a/b`.

    >>> find_numbers("16-3 is 13, not -1,200.5 or 3/4")
    ['16', '3', '13', '-1,200.5', '3/4']
    """
    return _WRITTEN_NUMBER.findall(to_ascii(text))


def count_numbers(text: str) -> int:
    """The number of numbers in a text, counted as in `find_numbers`."""
    return len(find_numbers(text))


# Answer lines

HASH_MARKER = re.compile(r"(?<!#)####(?!#)")
_CANONICAL = re.compile(r"-?[0-9]{1,5000}+(?:[/.][0-9]{1,5000}+)?+")
_DAYTIME = re.compile(r"(?<![A-Za-z])([ap])\. ?m(?![A-Za-z])\.?")
_SPACED_JOINER = re.compile(r"(?<=[0-9]) ?([:-]) ?(?=[0-9])")


def _marked_content(plain: str) -> str | None:
    """The text after the last `####` that has any on its line, cleaned. Markup and blanks do not count."""
    for line in reversed(plain.split("\n")):
        for content in reversed(HASH_MARKER.split(line)[1:]):
            cleaned = clean(content)
            if cleaned.strip("*"):
                return cleaned
    return None


def count_values(gold: str) -> int:
    """How many numbers the gold consists of; 0 for text."""
    return count_normalized(numeric_gold(gold))


def count_normalized(gold: str) -> int:
    """How many numbers a normalized gold consists of; 0 for text."""
    values = gold.split("; ")
    return len(values) if all(_CANONICAL.fullmatch(value) for value in values) else 0


def _read_line(content: str, count: int) -> Answer:
    """A cleaned answer line, for a gold of `count` numbers."""
    text = _normalized_text(content)
    if count == 0:
        return Answer(text or None, bool(text))
    values = stated_values(content)
    if count > 1 and (values is None or len(values) != count):
        # `148,296` is one number elsewhere; where two values are expected, the comma may separate them.
        separated = stated_values(content.replace(",", ", "))
        values = separated if separated is not None and len(separated) == count else values
    if values is None:
        return Answer(text or None, False)
    return Answer(_joined(values, content), len(values) == count)


def _normalized_text(cleaned: str) -> str:
    """Text as it is compared: lower case, `9 : 2` as `9:2`, `p.m.` as `pm`, no punctuation at its ends."""
    return _SPACED_JOINER.sub(r"\1", _DAYTIME.sub(r"\1m", cleaned.lower())).strip(" .,;:!?'\"$=")


def _joined(values: Sequence[Fraction | None], content: str) -> str:
    """The normalized form of the values in a text: fractions where it has a slash, and otherwise decimals."""
    return "; ".join(str(value) if value is None or "/" in content else _decimal_form(value) for value in values)


def _decimal_form(value: Fraction) -> str:
    """As a decimal number if it has at most `MAX_DIGITS` decimals, otherwise as a fraction."""
    places = next((n for n in range(MAX_DIGITS + 1) if 10**n % value.denominator == 0), 0)
    if places == 0:
        return str(value)
    digits = f"{abs(value.numerator) * 10**places // value.denominator:0{places + 1}d}"
    return f"{'-' * (value < 0)}{digits[:-places]}.{digits[-places:]}"


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
_OPERATORS = frozenset("+-*/^·×÷")
_MEANINGFUL = _OPERATORS | frozenset("=:")  # other symbols decorate, except those that change the number beside them:
_FOREIGN = frozenset("^<>|√±∞≤≥≠∤")  # the last one from `clean`, for a fraction of other things than numbers
_FOREIGN_WORDS = frozenset(["sqrt", "log", "ln", "sin", "cos", "tan", "pi", "π", "infty", "infinity", "half", "halves", "not"])
_HEADING_WORDS = frozenset(["step", "part", "case", "section", "question", "problem", "example"])
_MAGNITUDES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MAGNITUDES |= {"millions": 10**6, "billions": 10**9, "trillions": 10**12}  # 5 hundreds may be the place of a digit
_MAGNITUDES |= {"bn": 10**9, "mio": 10**6, "mrd": 10**9, "lakh": 10**5, "crore": 10**7}
_MAGNITUDES |= {"lakhs": 10**5, "crores": 10**7}
_MINUS = frozenset(["-", "minus", "negative"])
_GLUED_VARIABLES = frozenset("xyznkieXYZNKE")  # 2x and 5k are not 2 and 5
_SQUARED_UNIT = re.compile(r"(?:mm|cm|dm|km|m|in|ft|yd|mi)\^?[23]")


class _Token(NamedTuple):
    kind: str  # number, word, symbol, or group: a parenthesis with its content, whose text is the words in it
    text: str
    start: int
    end: int


def stated_values(content: str) -> list[Fraction] | None:
    """The values that a cleaned line states, in order; None if any part of it is not a plain value.

    Commas, semicolons and "and" separate values. Alternatives ("10 or 42") leave the answer open. In an equation the value is what
    follows the last equals sign. Parentheses after a number are remarks.

    >>> [str(stated_values(text)[0]) for text in ("$1,200.50", "1 1/2", "50%", "1.5e3", "6*7 = 42", "12 (3 groups of 4)")]
    ['2401/2', '3/2', '50', '1500', '42', '12']
    >>> [stated_values(text) for text in ("10 or 42", "4 2", "0x2A", "10-20", "9:2", "3 hours 20 minutes", "1/0")]
    [None, None, None, None, None, None, None]
    """
    if len(content) > MAX_LINE_CHARACTERS:
        return None
    tokens = _without_remarks(_tokens(content))
    separators = [index for index, token in enumerate(tokens) if _separates(token)]
    values: list[Fraction] = []
    for start, end in zip([-1, *separators], [*separators, len(tokens)], strict=True):
        part = tokens[start + 1 : end]
        if any(token.kind == "number" for token in part):
            value = _single_value(part)
            if value is None:
                return None
            values.append(value)
        elif any(map(_is_foreign, part)):
            return None  # "2 and a half"
    undecided = len(values) > 1 and any(tokens[index].text.lower() == "or" for index in separators)
    return values if values and not undecided else None


def _tokens(content: str) -> list[_Token]:
    return [_Token(match.lastgroup or "", match[0], match.start(), match.end()) for match in _TOKEN.finditer(content)]


def _separates(token: _Token) -> bool:
    return token.text.lower() in ("and", "or") if token.kind == "word" else token.text in (",", ";", "&")


def _without_remarks(tokens: Sequence[_Token]) -> list[_Token]:
    """`12 (3 groups of 4)` as 12 and one group. If all numbers are in parentheses, `-(1/3)`, only the parentheses are removed."""
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
    """The only number of a part of a line; None if there are several, or if it is an operand or a label."""
    if any(token.text in "<>≤≥≠" for token in part if token.kind == "symbol"):
        return None  # `x <= 4` is not an equation
    items = [token for token in _after_equals_sign(part) if token.kind != "symbol" or _matters(token)]
    first = next((index for index, token in enumerate(items) if token.kind == "number"), None)
    if first is None:
        return None
    allowed = 0 if _power_of_ten(items, first + 1) is None else 1  # scientific notation is the only place for a foreign sign
    if sum(map(_is_foreign, items)) > allowed:
        return None
    value, end = _number_at(items, first)
    before, after = items[:first], items[end:]
    if value is None or any(token.kind == "number" for token in after) or not _may_follow(items[end - 1], after):
        return None
    if after:
        value *= _MAGNITUDES.get(after[0].text.lower(), 1)
    if before and (before[-1].text == "+" or _is_minus(before[-1])):
        value = -value if _is_minus(before[-1]) else value
        before = before[:-1]
        if before and before[-1].kind == "group":
            return None
    return value if _may_precede(before, items[first]) else None


def _after_equals_sign(part: Sequence[_Token]) -> Sequence[_Token]:
    """The tokens after the last equals sign that has a number after it: `6*7 = 42` states 42."""
    last_number = max(index for index, token in enumerate(part) if token.kind == "number")
    start = max((index + 1 for index, token in enumerate(part[:last_number]) if token.text == "="), default=0)
    return part[start:]


def _matters(token: _Token) -> bool:
    return token.text in _MEANINGFUL or _is_foreign(token)


def _is_foreign(token: _Token) -> bool:
    """Whether a token changes the number beside it, or makes it none: a root, a power, digits of another script."""
    if token.kind == "word":
        return token.text.lower() in _FOREIGN_WORDS or token.text[0].isnumeric()
    return token.kind == "symbol" and (token.text in _FOREIGN or token.text.isnumeric())


def _is_minus(token: _Token) -> bool:
    return token.text.lower() in _MINUS


def _may_follow(number: _Token, after: Sequence[_Token]) -> bool:
    """Whether the number before these tokens is a plain value: words and units may follow it, an operator may not."""
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
        return following == ""  # in `2: add` the number labels what follows
    return follower.text == "-" and following in ("word", "")  # 42-year-old


def _is_unit(number: str, word: str) -> bool:
    if word[0] in "xXbBoO" and number == "0":
        return False  # hexadecimal, binary, octal
    if any(character.isnumeric() for character in word):
        return _SQUARED_UNIT.fullmatch(word.replace("²", "2").replace("³", "3")) is not None
    return word not in _GLUED_VARIABLES


def _may_precede(before: Sequence[_Token], number: _Token) -> bool:
    """Whether the number after these tokens is a plain value. Its sign is not among them."""
    if not before:
        return True
    last = before[-1]
    if last.kind == "word":
        return last.text.lower() not in _HEADING_WORDS and not _is_minus(last)  # the markdown heading `#### Step 2`, `minus -5`
    if last.kind == "group":
        return last.end != number.start or last.text != ""
    return last.text not in _OPERATORS


def _number_at(items: Sequence[_Token], index: int) -> tuple[Fraction | None, int]:
    """The unsigned number at `index` and the index after it: a decimal, `a/b`, `1 1/2`, or `1.5 x 10^3`."""
    value = _decimal(items[index].text)
    power = _power_of_ten(items, index + 1)
    if power is not None:
        exponent, end = power
        return (None if value is None or abs(exponent) > MAX_DIGITS else value * Fraction(10) ** exponent), end
    if _is_fraction(items, index):
        return _fraction_at(items, index)
    mixed = _is_fraction(items, index + 1) and all(_is_integer(items[index + offset]) for offset in (0, 1, 3))
    if mixed and items[index + 1].start > items[index].end:
        fraction, end = _fraction_at(items, index + 1)
        if value is not None and fraction is not None and fraction < 1:
            return value + fraction, end
    return value, index + 1


def _is_fraction(items: Sequence[_Token], index: int) -> bool:
    kinds = [token.kind for token in items[index : index + 3]]
    return kinds == ["number", "symbol", "number"] and items[index + 1].text == "/"


def _fraction_at(items: Sequence[_Token], index: int) -> tuple[Fraction | None, int]:
    numerator, denominator = _decimal(items[index].text), _decimal(items[index + 2].text)
    chained = _is_fraction(items, index + 2)
    if chained or numerator is None or not denominator:
        return None, index + 3  # a date, or a division by zero
    return numerator / denominator, index + 3


def _is_integer(token: _Token) -> bool:
    return token.kind == "number" and "." not in token.text and "e" not in token.text.lower()


def _power_of_ten(items: Sequence[_Token], index: int) -> tuple[int, int] | None:
    """The exponent of `x 10^3` at `index` and the index after it."""
    texts = [token.text for token in items[index : index + 5]]
    if len(texts) < 4 or texts[0] not in ("x", "X", "×", "*", "·") or texts[1:3] != ["10", "^"]:
        return None
    position = index + (4 if texts[3] in ("-", "+") else 3)
    if position >= len(items) or not _is_integer(items[position]) or len(items[position].text) > 4:
        return None
    exponent = int(items[position].text.replace(",", ""))
    return (-exponent if texts[3] == "-" else exponent), position + 1


def _decimal(text: str) -> Fraction | None:
    """`1,200.5` or `1e3` as a fraction; None for `1.2.3` and for more digits than any answer has."""
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, decimals = mantissa.replace(",", "").partition(".")
    digits, exponent = whole.lstrip("0") + decimals.rstrip("0"), exponent.lstrip("+-0") or "0"
    if "." in decimals or len(digits) > MAX_DIGITS or len(exponent) > 4 or int(exponent) > MAX_DIGITS:
        return None
    return Fraction(text.replace(",", ""))


def _numbers_in(line: str) -> list[Fraction | None]:
    """Every number of a cleaned line, prose included; None for digits that do not form a number."""
    items = [token for token in _tokens(end_of_line(line)) if token.kind != "symbol" or _matters(token) or token.text in "()%"]
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
    """A number with its sign; None if it is part of a time, a ratio, a range, a power, or perhaps of `72 000`."""
    number, last = items[index], items[end - 1]
    if end < len(items) and items[end].start == last.end:
        follower = items[end]
        if follower.kind == "word" and not _is_unit(last.text, follower.text):
            return None
        if _is_foreign(follower) or (follower.text == ":" and end + 1 < len(items) and items[end + 1].start == follower.end):
            return None
    if end < len(items):
        value *= _MAGNITUDES.get(items[end].text.lower(), 1)
    if index == 0:
        return value
    sign, glued = items[index - 1], items[index - 1].end == number.start
    if _is_integer(sign) and sign.end + 1 == number.start and len(sign.text) <= 3 == len(number.text):
        return None
    earlier = items[index - 2] if index > 1 else None
    joined = earlier is not None and (earlier.kind == "number" or earlier.text in (")", "%"))
    if _is_foreign(sign) and sign.kind == "symbol":
        return None
    if earlier is not None and joined and glued and sign.text in (":", "-") and earlier.end == sign.start:
        return None
    return -value if _is_minus(sign) and not joined else value


def _last_number(line: str) -> str | None:
    """The last number of a cleaned line, normalized."""
    numbers = _numbers_in(line)
    return _joined(numbers[-1:], line) if numbers and numbers[-1] is not None else None


# Lenient reading

_ANSWER_PHRASE = re.compile(r"(?<![^\W_])answer[\s*_`]{0,8}+(?:is|equals|:|=)(?!\w)[\s*_`:]{0,8}+", re.IGNORECASE)


def _lenient_values(response: str, gold: str) -> Iterator[str | None]:
    count = count_values(gold)
    plain = to_ascii(response)
    yield read_numeric(response, gold).value
    statements = [statement for statement in (boxed(plain), after_last(_ANSWER_PHRASE, plain)) if statement]
    for statement in statements:
        yield _read_line(statement, count).value
    statements.append(_marked_content(plain) or "")
    if count == 0:
        normalized = numeric_gold(gold)
        for text in map(_normalized_text, [*statements, last_line(plain)]):
            yield text
            if f" {text}".endswith(f" {normalized}"):
                yield normalized
        return
    for statement in statements:
        yield from _first_and_last(statement, count)
    for line in reversed(plain.split("\n")):
        cleaned = clean(line)
        if _numbers_in(cleaned):
            yield _first_and_last(cleaned, count)[1]
            return


def _first_and_last(cleaned: str, count: int) -> list[str | None]:
    """The first and the last `count` numbers of a line, each normalized."""
    numbers = _numbers_in(cleaned)
    ends = (numbers[:count], numbers[-count:])
    return [_joined(end, cleaned) if len(end) == count and None not in end else None for end in ends]
