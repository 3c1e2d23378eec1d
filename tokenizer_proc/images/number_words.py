"""Numbers as English words, as prompts spell them."""

UNITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen")
ONES = ("zero", *UNITS, *TEENS, "eighteen", "nineteen")
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """Return a number from 0 to 999,999 in words, British: "one hundred and one"."""
    if number < len(ONES):
        return ONES[number]
    if number < 100:
        ten, one = divmod(number, 10)
        return f"{TENS[ten - 2]}-{ONES[one]}" if one else TENS[ten - 2]
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    many, rest = divmod(number, size)
    joint = " and " if rest < 100 else ", "
    return f"{in_words(many)} {name}" + (joint + in_words(rest) if rest else "")
