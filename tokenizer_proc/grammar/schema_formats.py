"""The formats of strings that llguidance follows too freely, or too narrowly, as patterns.

They are for other readers: there is no year 0, and no leap second. Few programs read these, and no
pattern has the dates of leap seconds. https://www.rfc-editor.org/rfc/rfc3339#section-5.6
"""

YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # of years, of centuries
LEAP_YEAR = f"(?:[0-9]{{2}}{FOURTH}|{FOURTH}00)"
DAY_OF_ANY_YEAR = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
DATE = f"(?:{YEAR}-{DAY_OF_ANY_YEAR}|{LEAP_YEAR}-02-29)"
HOUR_AND_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{HOUR_AND_MINUTE})"

# https://www.rfc-editor.org/rfc/rfc3986#section-3.2.2
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
GROUP = "[0-9a-fA-F]{1,4}"
LAST_TWO = rf"(?:{GROUP}:{GROUP}|(?:{BYTE}\.){{3}}{BYTE})"
SHORTENED = (
    *(f"(?:(?:{GROUP}:){{0,{4 - n}}}{GROUP})?::(?:{GROUP}:){{{n}}}{LAST_TWO}" for n in range(5)),
    f"::(?:{GROUP}:){{5}}{LAST_TWO}",
    f"(?:(?:{GROUP}:){{0,5}}{GROUP})?::{GROUP}",
    f"(?:(?:{GROUP}:){{0,6}}{GROUP})?::",
)
IPV6 = "|".join((f"(?:{GROUP}:){{6}}{LAST_TWO}", *SHORTENED))

PATTERNS = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": DATE,
        "time": TIME,
        "date-time": f"{DATE}[Tt]{TIME}",
        "ipv6": IPV6,
    }.items()
}
LENGTHS = {"hostname": 253, "email": 254}  # characters, of what is followed well but for that
