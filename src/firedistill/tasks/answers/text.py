"""Text as answers are read from it: typography as ASCII, one line without markup, the last line, the last `\\boxed{}`."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

ANSWER_MARKER = re.compile(r"(?<![^\W_])answer[\s*_`]{0,8}+[:\uff1a]", re.IGNORECASE)  # Answer: and **Answer**:
BLANK = ' *_`"\t\r\n'  # of a line with nothing but marks
MAX_LINE_CHARACTERS = 2000  # answer lines are shorter; only the end of a longer last line is searched for a number


@dataclass(frozen=True)
class Answer:
    """The answer that a response gives.

    Attributes:
        value: normalized. A number is a decimal (`"42"`, `"2.5"`), or a reduced fraction where the text has a slash (`"-7/2"`);
            several numbers are joined (`"2; 6"`); any other text is in lower case with single spaces (`"11:30"`). A choice is one
            of the labels. None if no answer was found.
        well_formed: whether the answer is on the required line, in an accepted form.
    """

    value: str | None
    well_formed: bool


INVISIBLE = [0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFE0E, 0xFE0F, 0xFEFF]
_ASCII: dict[int, str | None] = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # the full-width forms of ! to ~
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63"), "-"),
    **dict.fromkeys(INVISIBLE),
    **{ord(sign): " " + unicodedata.normalize("NFKC", sign).replace("\u2044", "/") for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"},
    **{0x2044: "/", 0x2215: "/", 0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x3000: " ", 0x3002: ".", 0xFFE0: "¢"},
    **{0xFFE1: "£", 0xFFE5: "¥"},
}


def to_ascii(text: object) -> str:
    """Full-width forms, dashes, quotes and vulgar fractions as ASCII, line breaks as `\\n`, without invisible characters."""
    if not isinstance(text, str):
        return ""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.isascii() else text.translate(_ASCII)


CALCULATOR_MARK = re.compile(r"<<[^<>]*+>>")  # GSM8K's working: 6*7=<<6*7=42>>42
# <b>, </answer>, <|im_end|>, <br />, <i class="x">
_TAG = re.compile(r"</?\|?[A-Za-z_]\w{0,19}+(?:\s\w{1,20}+=[^<>]{0,200}+)?\s?/?\|?>")
_ANGLE_BRACKETS = re.compile(r"\s*+<([^<>]*+)>\s*+")  # <42>
_GROUPS = re.compile(r"(?<=[0-9])(?:\\[, ]|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))")  # 10\\,000
_DEGREES = re.compile(r"\^\s{0,3}+\{?\s{0,3}+\\circ(?![A-Za-z])\s{0,3}+\}?")
_BRACED_POWER = re.compile(r"\^\{([-+]?[0-9]{1,4})\}")
_SIGNS = {
    "times": "×", "cdot": "·", "div": "÷", "approx": "≈", "sqrt": "√", "pi": "π", "infty": "∞", "pm": "±", "le": "≤",
    "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠", "Rightarrow": " = ", "rightarrow": " = ", "to": " = ",
}  # fmt: skip
_SIGN_COMMAND = re.compile(rf"\\({'|'.join(_SIGNS)})(?![A-Za-z])")
_WRAPPER_COMMAND = re.compile(
    r"\\(?:boxed|fbox|mbox|text(?:bf|rm|it|tt|sf)?|math(?:bf|rm|it|tt|sf)|operatorname|displaystyle|left|right|q?quad)(?![A-Za-z])"
    r"|\\[()\[\],;:! ]"
)
_PART = r"(?:\{\s{0,3}+([-+]?)\s{0,3}+([0-9][0-9.,]{0,300}+)\s{0,3}+\}|([0-9]))"  # in braces, or a single digit
_FRACTION_COMMAND = re.compile(rf"\\[cdt]?frac(?:\s{{0,3}}+{_PART}\s{{0,3}}+{_PART}|(?![A-Za-z]))")
_MARKUP = str.maketrans("{}`_", "    ")
_BOLD = re.compile(r"\*{2,3}+")
_EMPHASIS = re.compile(r"(?<![\w)*.])\*(?=\S)([^*]++)(?<=\S)\*(?![\w(*])")  # *42*, but not the star of 6*7
_ARROW = re.compile(r"[-=]{1,3}+>|[→⇒⟹]")


def clean(text: str) -> str:
    """One line without markdown, LaTeX commands and tags, with single spaces.

    Removed markup leaves a space; without it, the power `10**3` would become the number 103.
    """
    if "<" in text:
        whole = _ANGLE_BRACKETS.fullmatch(text)
        text = whole[1] if whole else _TAG.sub(" ", CALCULATOR_MARK.sub(" ", text))
    text = _GROUPS.sub(",", text.replace("{,}", ","))
    if "\\" in text:
        text = text.replace(",\\!", ",").replace("\\$", "$").replace("\\%", "%")
        text = _DEGREES.sub("°", text)
        text = _SIGN_COMMAND.sub(lambda match: _SIGNS[match[1]], text)
        text = _WRAPPER_COMMAND.sub(" ", text)
        text = text.replace("}^", "^")  # \text{cm}^2
        text = _FRACTION_COMMAND.sub(_plain_fraction, text)
    text = _BRACED_POWER.sub(r"^\1", text.replace("!=", "≠")).translate(_MARKUP)
    text = _EMPHASIS.sub(r" \1 ", _BOLD.sub(" ", text))
    return " ".join(_ARROW.sub(" = ", text).split())


def _plain_fraction(match: re.Match[str]) -> str:
    """`3/4`; a sign that no number has where a part is not one."""
    sign, numerator, digit, other_sign, denominator, other_digit = match.groups()
    if not (numerator or digit):
        return " ∤ "
    minus = "-" if (sign == "-") != (other_sign == "-") else ""
    return f" {minus}{numerator or digit}/{denominator or other_digit} "


def last_line(plain: str) -> str:
    """The last line that is not blank, cleaned; of a very long line only the end."""
    return next((end_of_line(clean(line)) for line in reversed(plain.split("\n")) if line.strip()), "")


def end_of_line(line: str) -> str:
    """The last characters of a line, from a space on, so that no number is cut in two."""
    return line if len(line) <= MAX_LINE_CHARACTERS else line[-MAX_LINE_CHARACTERS:].partition(" ")[2]


def boxed(plain: str) -> str | None:
    """The content of the last `\\boxed{}`, cleaned; up to the end of its line if the brace is not closed."""
    content = boxed_latex(plain)
    return None if content is None else clean(content)


def boxed_latex(plain: str) -> str | None:
    """The content of the last `\\boxed{}` as it stands; up to the end of its line if the brace is not closed."""
    _, opening, rest = plain.rpartition("\\boxed{")
    if not opening:
        return None
    depth = 1
    for match in re.finditer(r"[{}]", rest):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return rest[: match.start()]
    return rest.partition("\n")[0]


def after_last(pattern: re.Pattern[str], plain: str) -> str | None:
    """The text from the last match of a pattern to the end of its line, cleaned."""
    end = max((match.end() for match in pattern.finditer(plain)), default=None)
    return None if end is None else clean(plain[end:].partition("\n")[0])[:MAX_LINE_CHARACTERS]
